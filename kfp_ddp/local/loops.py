"""Loops of kfp.local 2.17, corrected: each step of a loop gets the values that it asks for.

There, the item of a loop takes the place of each output of an earlier task, and in a nested loop of
each item of the outer one; and only an output of the name `Output` can be looped over.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from kfp.compiler.pipeline_spec_builder import to_protobuf_value
from kfp.local.orchestrator import enhanced_dag_orchestrator, task_spec_utils
from kfp.local.orchestrator.orchestrator_utils import OrchestratorUtils
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineTaskSpec, TaskInputsSpec

ITEM = "-loop-item"
"""End of the name that the compiler gives to the item of a loop."""


def correct() -> None:
    """Replace the two functions of kfp.local, where the installed one has them."""
    orchestrator = vars(enhanced_dag_orchestrator)
    if run_loop := orchestrator.get("_run_parallel_for_task"):
        orchestrator["_run_parallel_for_task"] = _with_items(run_loop)
        vars(task_spec_utils)["create_parameter_loop_iteration_task_spec"] = _iteration


def _iteration(loop: Any, item: Any, _: str) -> Any:
    """Return the task of one iteration: its own item, and all other inputs as they are."""
    task = PipelineTaskSpec()
    task.CopyFrom(loop)
    inputs = task.inputs.parameters
    for given in inputs.values():
        if given.task_output_parameter.output_parameter_key.endswith(ITEM):
            # The compiler asks an earlier task for the item of a loop below, which sets it itself.
            given.runtime_value.constant.string_value = ""
    own = inputs[loop.parameter_iterator.item_input]
    own.runtime_value.constant.CopyFrom(to_protobuf_value(item))
    task.ClearField("parameter_iterator")
    return task


def _with_items(run_loop: Callable[..., bool]) -> Callable[..., bool]:
    """Return the runner of a loop, which gets the items as constants."""

    @functools.wraps(run_loop)
    def run(*, task_spec: Any, io_store: Any, **more: Any) -> bool:
        name = task_spec.parameter_iterator.items.input_parameter
        if name:
            inputs = TaskInputsSpec()
            inputs.parameters[name].CopyFrom(task_spec.inputs.parameters[name])
            values = OrchestratorUtils.make_task_arguments(inputs, io_store)
            loop = PipelineTaskSpec()
            loop.CopyFrom(task_spec)
            loop.parameter_iterator.items.raw = json.dumps(values[name])
            task_spec = loop
        return run_loop(task_spec=task_spec, io_store=io_store, **more)

    return run
