"""Codecs: how a tensor of fixed-point values becomes few bytes, and back.

Nodes must agree on the wire form and its decoding. `encode` is the reference that the trainer's device
encoders (`gossamer.node.trainer.encoders`) match bit for bit. A record names its codec, and the merge sees
integers only, so a round may mix codecs: any of the manifest's ladder.
"""

from gossamer.protocol.codecs.base import Codec
from gossamer.protocol.codecs.block import INT4, INT8
from gossamer.protocol.codecs.exact import ExactCodec
from gossamer.protocol.codecs.topk import TOPK, TOPK8, TOPK16
from gossamer.protocol.codecs.two_bit import TwoBitCodec

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (ExactCodec(), INT8, INT4, TwoBitCodec(), TOPK8, TOPK16, TOPK)
}
"""Every codec by the name that manifests and records use."""

__all__ = ["CODECS", "Codec"]
