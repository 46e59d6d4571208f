"""Where a run in a user's own loop begins: at the newest snapshot of its folder, where a trainer left it, or anew."""

from rewound.loops.checkpoints import Folder, progress_in
from rewound.loops.run import Run
from rewound.loops.schedulers import check_new


def resume_or_begin(run: Run, folder: Folder) -> None:
    """Bring the run to where it begins, with the subjects as they were there; the folder is its own from here on."""
    course, subjects = run.course, run.subjects
    content = folder.resumable(course.densities, run.say) if run.resumes else None
    if run.handed_over:  # by a trainer, which has restored the subjects
        content = None
    elif content is None and not course.adopt:
        check_new(subjects.schedulers)
    past_dense = content is not None and bool(progress_in(content).densities)
    arguments = course.arguments(subjects.model, subjects.optimizer)
    folder.claim(arguments, ["compression"] if past_dense else ["compression", "final"], check=run.resumes)
    if content is not None:
        subjects.resume(content)
        run.progress = progress_in(content)
