"""Where a run in a user's own loop begins: at the newest snapshot of its folder, where a trainer left it, or anew."""

import secrets

from rewound.foundations.errors import InputError
from rewound.loops import ranks
from rewound.loops.checkpoints import Folder, rewind_name
from rewound.loops.course import Course
from rewound.loops.progress import Progress
from rewound.loops.rehearsal import check_final_ahead
from rewound.loops.rewinding import nothing_to_rewind_to
from rewound.loops.run import Run
from rewound.loops.schedulers import check_new, check_none_forgotten
from rewound.loops.sealed import Damaged


def resume_or_begin(run: Run, folder: Folder) -> None:
    """Bring the run to where it begins, with the subjects as they were there; the folder is its own from here on."""
    course, subjects = run.course, run.subjects
    newest, damaged = folder.newest(course.densities) if run.resumes else (None, [])
    if run.handed_over:  # by a trainer, which has restored the subjects
        newest, damaged = None, []
    elif newest is None and not course.adopt:
        check_new(subjects.schedulers)
        if run.resumes and course.final is None:
            check_final_ahead(course.how, subjects, course.training_time)
    progress = run.progress if newest is None else newest.progress
    if not progress.run:
        goes_on = newest is not None or run.handed_over  # since a version without names
        progress.run = ranks.from_first(folder.run if goes_on else "") or ranks.from_first(secrets.token_hex(8))
    if run.is_resumable and progress.epoch < course.dense.length:
        check_none_forgotten(subjects.schedulers, subjects.optimizer)
    arguments = course.arguments(subjects.model, subjects.optimizer)
    may_differ = ["compression"] if newest is not None and progress.densities else ["compression", "final"]
    if course.one_shot:  # it has no meaning there, and was once accepted
        may_differ.append("rate")
    folder.claim(arguments, progress.run, run.say, may_differ, check=run.resumes)
    if newest is not None or run.handed_over:
        _check_rewound_to(course, progress, folder)
    if newest is not None:
        folder.set_aside(damaged, progress.epoch, run.say)
        subjects.resume(newest.content)
        run.progress = progress


def _check_rewound_to(course: Course, progress: Progress, folder: Folder) -> None:
    """Whether what the next level goes back to is there, before the present one is trained to its end."""
    if progress.level == len(course.levels):
        return
    for epoch in course.rewound_to:
        if not progress.level and progress.epoch <= epoch:
            continue  # it is still to be written
        try:
            if not folder.check(rewind_name(epoch)):
                raise nothing_to_rewind_to(epoch, folder)
        except Damaged as error:
            raise InputError(f"{error}, and the next level goes back to it; train anew in another folder") from error
