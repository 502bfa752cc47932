"""Base of the parts of the settings of a training run."""

from typing import Any

from kfp_ddp.core.settings import Settings


class SettingsPart(Settings):
    """A part of the settings of a training run; it checks the rules among its own fields."""

    def is_set(self, name: str) -> bool:
        """Return whether the field was set; a default may be replaced by a better one."""
        return name in self.model_fields_set

    def _fill(self, **values: Any) -> None:
        """Change fields of this frozen model while it is validated; they do not count as set."""
        # An attribute is frozen, and model_copy marks a field as set: to_argv would repeat it.
        self.__dict__.update(values)
