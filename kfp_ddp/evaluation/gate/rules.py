"""The rules that a model must meet, and what each of them needs to be asked."""

from typing import ClassVar

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING


class Rules(Settings):
    """Thresholds; each default is met by every model, so a rule that is not set asks nothing."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}

    min_accuracy: float = Field(0.0, ge=0, le=1)
    """Accuracy that the model must have, as a share: 0.97 for 97 %."""
    use_lower_bound: bool = False
    """Hold min_accuracy against the lower end of the accuracy's 95 % interval."""
    min_balanced_accuracy: float = Field(0.0, ge=0, le=1)
    """Mean recall of the classes with samples, as a share: large classes count no more than small
    ones."""
    min_class_recall: float = Field(0.0, ge=0, le=1)
    """Recall that every class must have, as a share: 0.97 for 97 %; without samples it has
    none."""
    min_slice_accuracy: float = Field(0.0, ge=0, le=1)
    """Accuracy that every slice by tags must have, as a share, if it has min_slice_samples."""
    min_slice_samples: int = Field(30, ge=1)
    """Samples from which on min_slice_accuracy counts for a slice."""
    max_calibration_error: float = Field(1.0, ge=0, le=1)
    """Expected calibration error to have at most, as a share: 0.97 for 97 %."""
    min_improvement: float = Field(0.0, ge=-1, le=1)
    """Accuracy to gain on the champion, a share: 0.001 asks for a tenth of a percent more; at 0 a
    tie passes."""
    max_p_value: float = Field(1.0, gt=0, le=1)
    """Chance that the gain is luck, by McNemar's exact test on the same samples; 1 to not ask."""
    champion_must_exist: bool = False
    """Fail where no model lies at champion yet, as after a misspelt name; false for a first run."""
    champion_key: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret that holds a public key in PEM: a champion that is not signed by
    its private half is not believed; empty to not ask."""
    max_latency_ms: float = Field(0.0, ge=0)
    """Milliseconds that the answer to one image may take, the median where the bundle was made; 0
    to not ask."""
    budget_of: str = "model.onnx"
    """The file of the bundle whose latency and memory are bounded."""
    max_bundle_mb: float = Field(0.0, ge=0)
    """Size of all files of the bundle together, in 10^6 bytes; 0 to not ask."""
    max_memory_mb: float = Field(0.0, ge=0)
    """Memory at most of the process that only serves the model, in 10^6 bytes; 0 to not ask."""
    must_serve: bool = False
    """Fail where no process with the runtime alone has answered from the bundle; one that answered
    wrongly always fails."""
    max_variant_loss: float = Field(1.0, ge=0, le=1)
    """Accuracy that a variant of the bundle may lose against the model, as a share."""
    min_variant_agreement: float = Field(0.0, ge=0, le=1)
    """Share of the samples for which a variant must tell the class that the model does."""

    @property
    def need_evaluation(self) -> list[str]:
        """The rules set that ask for more than the accuracy alone."""
        asked = {
            "use_lower_bound": self.use_lower_bound,
            "min_balanced_accuracy": self.min_balanced_accuracy > 0,
            "min_class_recall": self.min_class_recall > 0,
            "min_slice_accuracy": self.min_slice_accuracy > 0,
            "max_calibration_error": self.max_calibration_error < 1,
        }
        return [name for name, is_set in asked.items() if is_set]

    @property
    def need_champion(self) -> list[str]:
        """The rules set that compare with a champion."""
        asked = {
            "min_improvement": self.min_improvement != 0,
            "max_p_value": self.max_p_value < 1,
            "champion_must_exist": self.champion_must_exist,
            "champion_key": bool(self.champion_key),
        }
        return [name for name, is_set in asked.items() if is_set]

    @property
    def need_bundle(self) -> list[str]:
        """The rules set that look at what serves."""
        asked = {
            "max_latency_ms": self.max_latency_ms > 0,
            "max_bundle_mb": self.max_bundle_mb > 0,
            "max_memory_mb": self.max_memory_mb > 0,
            "must_serve": self.must_serve,
            "max_variant_loss": self.max_variant_loss < 1,
            "min_variant_agreement": self.min_variant_agreement > 0,
        }
        return [name for name, is_set in asked.items() if is_set]

    def check_champion(self, champion: str) -> None:
        """Refuse rules that compare with a champion where none is named.

        Raises:
            InputError: naming the rule.
        """
        if self.need_champion and not champion:
            raise InputError(
                f"{self.need_champion[0]} is set but champion is empty: give the champion's "
                "evaluation.json, its folder or its bundle"
            )

    def check_inputs(self, evaluation: str, bundle: str, champion: str) -> None:
        """Refuse rules that ask for what the step was not given.

        Raises:
            InputError: naming the rule and the output to connect.
        """
        needed = self.need_evaluation + (["champion"] if champion else [])
        needed += ["bundle"] if bundle else []
        if needed and not evaluation:
            raise InputError(
                f"{needed[0]} is set but evaluation is empty: connect the evaluation output of "
                "evaluate"
            )
        if self.need_bundle and not bundle:
            raise InputError(
                f"{self.need_bundle[0]} is set but bundle is empty: connect the bundle output of "
                "export"
            )
        self.check_champion(champion)
