"""The built-in GPT in Hugging Face's format: the files beside its weights that let `transformers` load it.

`gpt.py` has the names and conventions of `LlamaForCausalLM`, so the weights themselves are used unchanged.
The tokenizer is bytes: token `i` is byte `i`, written by hand as a byte-level BPE without merges. Nothing
here needs `transformers`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.models.gpt import GPTConfig

BYTES = 256


def llama_files(config: GPTConfig) -> dict[str, bytes]:
    """Files by name: the configuration and, for a byte-level model, its tokenizer."""
    # Llama's defaults name bytes 1 and 2 as the beginning and the end of a text; here all bytes are text.
    no_marks = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    files = {
        "config.json": _configuration(config) | no_marks,
        "generation_config.json": {"do_sample": True} | no_marks,
    }
    if config.vocab == BYTES:
        files["tokenizer.json"] = _byte_tokenizer()
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.context,
        }
    return {name: (json.dumps(values, indent=2) + "\n").encode() for name, values in files.items()}


def _configuration(config: GPTConfig) -> dict[str, Any]:
    """A `LlamaConfig`; where releases of transformers use different names, both are given."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.width // config.heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def _byte_tokenizer() -> dict[str, Any]:
    """A `tokenizer.json` in which every byte is its own token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {character: byte for byte, character in enumerate(_visible_bytes())},
            "merges": [],
        },
    }


def _visible_bytes() -> str:
    """The 256 characters that stand for bytes in byte-level tokenizers, by GPT-2's rule.

    Bytes that are printable in Latin-1 stand for themselves; the others get the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES, 2 * BYTES))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(BYTES))
