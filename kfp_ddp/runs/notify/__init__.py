"""What a run came to, told to people where they read: a webhook, Slack, e-mail."""

from kfp_ddp.runs.notify.channels import send
from kfp_ddp.runs.notify.outcome import Outcome
from kfp_ddp.runs.notify.refusals import refusals_told
from kfp_ddp.runs.notify.settings import Notification

__all__ = ["Notification", "Outcome", "refusals_told", "send"]
