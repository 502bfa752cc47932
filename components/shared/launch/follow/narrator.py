"""What is told of a job besides its logs: where it is and what it waits for."""

from collections.abc import Sequence

from kfp_ddp.components.shared.cluster.api import Api, Object
from kfp_ddp.components.shared.launch.follow.decisions import Look
from kfp_ddp.components.shared.launch.follow.pending import explain
from kfp_ddp.components.shared.launch.follow.printer import Printer

EXPLAIN_SECONDS = 2.0
# A queue may hold a job for days: what does not change there is asked for less and less often.
QUEUE_SECONDS = 30.0


class Narrator:
    """Prints where a job is and what it waits for, when that is new."""

    def __init__(self, printer: Printer, api: Api) -> None:
        self.printer, self.api = printer, api
        self.line = ""
        """What was told last."""
        self.phase = ""
        self.pause = EXPLAIN_SECONDS
        """How long what a queue says is not asked for again."""
        self.asked_at = 0.0

    def tell(self, look: Look, events: Sequence[Object]) -> None:
        """Print it if some time has passed since it was asked for."""
        phase = look.state.phase
        pause = self.pause if phase == self.phase == "queued" else EXPLAIN_SECONDS
        if look.state.over or look.clock - self.asked_at < pause:
            return
        self.asked_at = look.clock
        pods = list(look.pods.present.values())
        reason = explain(look.job, look.state, pods, list(events), self.api)
        line = f"{look.name} is {phase}" + (f": {reason}" if reason else "")
        if line == self.line:
            self.pause = min(self.pause * 2, QUEUE_SECONDS)
            return
        self.printer.say(line)
        self.line, self.phase, self.pause = line, phase, EXPLAIN_SECONDS
