"""What a step keeps in the run's folder while it follows a job: log cursors and a heartbeat.

It looks there how far its checkpoints are, too.

The heartbeat is a dead man's switch: rank 0 stops the job, with a checkpoint, when the file goes
stale; see `stop_when_stale` of `kfp_ddp.training.config.TrainConfig`.
"""

import contextlib
import time

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.follow.printer import Printer

TOUCH_SECONDS = 10.0
# Each save is a sync of the claim's file system.
SAVE_SECONDS = 0.5


class StepFiles:
    """The files of one step; a claim that cannot be written now is tried again."""

    def __init__(self, folder: RunFolder, job: str, printer: Printer) -> None:
        self.printer, self.heartbeat = printer, folder.heartbeat
        self.checkpoints = folder.checkpoints
        self.cursors = folder.log_positions(job)
        """For a successor of this step, which goes on in the logs where this one ended."""
        self.saved = ""
        self.saved_at = self.touched_at = 0.0
        if self.cursors.exists():
            printer.load(self.cursors.read_text())

    def keep(self, clock: float) -> None:
        """Write what is due by the monotonic clock."""
        if clock - self.saved_at >= SAVE_SECONDS:
            self.saved_at = clock
            self.save_cursors()
        if clock - self.touched_at < TOUCH_SECONDS:
            return
        self.touched_at = clock
        try:
            self.heartbeat.write_text(f"{time.time():.0f}\n")  # a bucket tells content alone
        except OSError as error:
            print(f"warning: cannot touch {self.heartbeat}: {error.strerror}", flush=True)

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 for none."""
        names = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def leave(self) -> None:
        """Note how far the logs were printed, and print no more; for a signal handler."""
        self.printer.stop()
        self.save_cursors()

    def save_cursors(self) -> None:
        """Write the cursors if they changed."""
        text = self.printer.dump()
        if text == self.saved:
            return
        with contextlib.suppress(OSError):
            with atomic_write(self.cursors) as file:
                file.write(text.encode())
            self.saved = text
