"""What a bundle's model says of pictures: `load("bundle")(["picture.jpg"])`, without torch."""

from kfp_ddp.predict.model import Model, load

__all__ = ["Model", "load"]
