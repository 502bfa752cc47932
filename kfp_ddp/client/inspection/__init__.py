"""What a run came to, for those who look into it afterwards: on KFP, or in a folder here."""

from kfp_ddp.client.inspection.subject import Subject, Subjects, subjects

__all__ = ["Subject", "Subjects", "subjects"]
