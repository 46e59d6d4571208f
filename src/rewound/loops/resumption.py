"""Where a run in a user's own loop begins: at the newest snapshot of its folder, where a trainer left it, or anew."""

from collections.abc import Callable
from pathlib import Path

from rewound.loops.checkpoints import Folder, progress_in
from rewound.loops.course import Course
from rewound.loops.progress import Progress
from rewound.loops.schedulers import check_new
from rewound.loops.snapshot import Subjects


def begun(
    progress: Progress,
    course: Course,
    subjects: Subjects,
    folder: Folder,
    say: Callable[[str], None],
    resume: bool,
    handed_over: bool,
) -> Progress:
    """How far the run has come, with the subjects as they were there; the folder is its own from here on."""
    content = folder.resumable([level.density for level in course.levels], say) if resume else None
    if handed_over:  # by a trainer, which has restored the subjects
        content = None
    elif content is None and not course.adopt:
        check_new(subjects.schedulers)
    past_dense = content is not None and bool(progress_in(content).densities)
    arguments = course.arguments(subjects.model, subjects.optimizer)
    folder.claim(arguments, ["compression"] if past_dense else ["compression", "final"], check=resume)
    if content is None:
        return progress
    subjects.resume(content)
    return progress_in(content)


def epochs_in(folder: Path, course: Course) -> int:
    """How many epochs are done where a run in this folder would begin."""
    content = Folder(folder).resumable([level.density for level in course.levels])
    return 0 if content is None else progress_in(content).epoch
