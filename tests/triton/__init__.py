"""Triton's own definition of a model's configuration, to hold `config.pbtxt` to."""

import functools
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from grpc_tools import protoc  # type: ignore[import-untyped]


def parsed(text: str, folder: Path) -> Any:
    """The ModelConfig of a `config.pbtxt`; raises ParseError for what Triton does not know."""
    return text_format.Parse(text, _message(folder)())


@functools.cache
def _message(folder: Path) -> Any:
    here, made = Path(__file__).parent, folder / "model_config.pb"
    words = ["protoc", f"-I{here}", f"--descriptor_set_out={made}", "model_config.proto"]
    assert protoc.main(words) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
