"""Two ranks, each on a GPU of its own: what the exchange of gradients costs."""

import contextlib
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.training import trainer_on

WORLD, STEPS = 2, 10


def together(root: str, name: str, size: int, fields: dict[str, Any]) -> dict[str, float]:
    """What `of_rank` measures, as the first of two ranks sees it.

    Raises:
        RuntimeError: a rank failed; it has said why.
    """
    from torch import multiprocessing

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        arguments = (str(answer), port, root, name, size, fields)
        ranks = [context.Process(target=_rank, args=(i, *arguments)) for i in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank of {name} failed")
        return _read(answer)


def _rank(number: int, answer: str, port: int, *arguments: Any) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(WORLD), MASTER_PORT=str(port))
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        figures = of_rank(*arguments)
    if number == 0:
        Path(answer).write_text("\n".join(f"{key} {value}" for key, value in figures.items()))


def _read(answer: Path) -> dict[str, float]:
    lines = (line.split() for line in answer.read_text().splitlines())
    return {key: float(value) for key, value in lines}


def of_rank(root: str, name: str, size: int, fields: dict[str, Any]) -> dict[str, float]:
    """This rank's seconds of a step, and of an all-reduce of its gradients alone."""
    import torch

    torch.backends.cudnn.benchmark = True
    trainer = trainer_on(Path(root), name, size, **fields)
    batches: Iterator[Any] = itertools.repeat(next(trainer.batches()))
    cuda = trainer.world.device.type == "cuda"
    count = sum(weight.numel() for weight in trainer.learner.network.parameters())
    flat = torch.zeros(count, device=trainer.world.device)

    def timed(call: Any) -> float:
        trainer.world.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            call()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    step = statistics.median([timed(lambda: trainer.advance(batches)) for _ in range(4)][1:])
    alone = min(timed(lambda: torch.distributed.all_reduce(flat)) for _ in range(3))
    trainer.world.barrier()
    torch.distributed.destroy_process_group()
    return {"step": step, "all_reduce": alone, "bytes": 4 * count}
