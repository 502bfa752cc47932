from kfp_ddp.components.train.component import train
from kfp_ddp.training.config import TrainConfig

# The step sets these itself.
OWN = {"data", "output_dir", "run_id", "stop_when_stale", "stale_seconds"}


def test_the_step_offers_every_field_of_a_training_with_its_default() -> None:
    inputs = train.component_spec.inputs
    offered = {
        name: inputs[name].default
        for name in TrainConfig.model_fields
        if name in inputs.keys() - OWN
    }
    wanted = {n: f.default for n, f in TrainConfig.model_fields.items() if n not in OWN}
    assert offered == wanted
