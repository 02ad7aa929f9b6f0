"""A small Llama or Mixtral on the source of Python's library: `transformers.Trainer`, and a callback.

    python llama_trainer.py --listen 127.0.0.1:7700
    python llama_trainer.py --join 127.0.0.1:7700 --dir two

Needs ``pip install 'gossamer[hf]'``. Downloads nothing: the text is on every machine, and bytes are tokens.
Under ``torchrun --nproc-per-node=2 llama_trainer.py ...`` two processes are one node.

With ``--experts 8`` the model is a mixture of experts, two of which see each byte. Its loss then contains
some of the router's own, which keeps the experts evenly busy.
"""

import argparse
import secrets
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from gossamer.bootstrap import manifests
from gossamer.models.corpus import load_corpus
from gossamer.node.adapters.transformers import EvaluatesAverage, GossamerCallback
from gossamer.node.trainer.data import constant

CONTEXT = 64


class AveragingTrainer(EvaluatesAverage, Trainer):
    """Evaluates the averaged model, too."""


class Windows(Dataset[dict[str, Tensor]]):
    """Text cut into windows of `CONTEXT` tokens."""

    def __init__(self, text: Tensor, tokenizer: ByT5Tokenizer) -> None:
        """`text` is bytes, uint8[n]."""
        ids = text.long() + tokenizer.convert_tokens_to_ids("\0")
        self.rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build_model(vocabulary: int, experts: int) -> PreTrainedModel:
    """The model, with the same first parameters on every node; the head is tied to the embedding."""
    torch.manual_seed(0)
    size = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    if not experts:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=192, **size))
    mixture = {"num_local_experts": experts, "num_key_value_heads": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(intermediate_size=96, **mixture, **size))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("llama.toml"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0)
    options = parser.parse_args()

    tokenizer = ByT5Tokenizer()
    text = load_corpus([], CONTEXT)
    model = build_model(len(tokenizer), options.experts)
    plan = TrainingArguments(
        output_dir="llama",
        use_cpu=not torch.cuda.is_available(),
        max_steps=10_000,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        data_seed=secrets.randbelow(2**32),  # each node goes through the text in a different order
    )
    if plan.process_index == 0 and not options.manifest.exists():
        manifests.write(manifests.describe(model, name="llama", every_steps=20), options.manifest)

    swarm = GossamerCallback(
        manifest=options.manifest,
        join=options.join,
        listen=options.listen,
        folder=options.dir,
        stop_round=options.rounds,
        schedule=constant(warm_up_tokens=50_000),
    )
    held_out = Windows(torch.from_numpy(text.held_out[: 64 * CONTEXT]), tokenizer)
    trainer = AveragingTrainer(
        model,
        plan,
        train_dataset=Windows(torch.from_numpy(text.train), tokenizer),
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[swarm],
    )
    # Not with `trainer`: once evaluated, a model is no longer wrapped in DistributedDataParallel.
    first = Trainer(
        build_model(len(tokenizer), options.experts), plan, eval_dataset=held_out, processing_class=tokenizer
    )
    before = first.evaluate()["eval_loss"]
    with swarm:
        trainer.train()
    after = trainer.evaluate()
    print(f"held-out loss {before:.3f} -> {after['eval_loss']:.3f}, nats a byte")
    print(f"of the averaged model: {after['eval_loss_average']:.3f}")


if __name__ == "__main__":
    main()
