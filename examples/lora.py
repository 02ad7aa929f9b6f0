"""Fine-tuning with low-rank adapters (`peft`): nothing but the adapters travels.

    python lora.py --listen 127.0.0.1:7700
    python lora.py --join 127.0.0.1:7700 --dir two
    gossamer export adapter --dir two                  # a folder for PeftModel.from_pretrained

Needs ``pip install 'gossamer[hf]' peft``. The model that is fine-tuned must be the same on every node: here a
small Llama that the first script trains on the source of Python's standard library, and leaves in ``--base``.
It is then fine-tuned on the same in capitals.
"""

import argparse
import secrets
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gossamer.bootstrap import manifests
from gossamer.models.corpus import load_corpus
from gossamer.node.adapters.transformers import EvaluatesAverage, GossamerCallback

CONTEXT = 64
BASE_STEPS = 300


class AveragingTrainer(EvaluatesAverage, Trainer):
    """Evaluates the averaged adapters, too."""


def rows_of(text: bytes) -> list[dict[str, Tensor]]:
    """Text cut into windows of `CONTEXT` bytes, which are the tokens."""
    ids = torch.tensor(list(text)).long()
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in windows]


def plan(**options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir="lora",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=16,
        save_strategy="no",
        report_to="none",
        logging_steps=50,
        disable_tqdm=True,
        **options,
    )


def build_base(folder: Path, text: bytes) -> None:
    """Train the model that is fine-tuned afterwards."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config)
    Trainer(model, plan(max_steps=BASE_STEPS, learning_rate=3e-3), train_dataset=rows_of(text)).train()
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--manifest", type=Path, default=Path("lora.toml"))
    parser.add_argument("--base", type=Path, default=Path("base"))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()

    text = load_corpus([], CONTEXT)
    train, held_out = text.train[:1_000_000].tobytes(), text.held_out[: 64 * CONTEXT].tobytes()
    if not options.base.exists():
        build_base(options.base, train)
    torch.manual_seed(0)  # the swarm's first adapters; those who join take them over
    low_rank = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(options.base), low_rank)
    if not options.manifest.exists():
        manifests.write(manifests.describe(model, name="lora", every_steps=10), options.manifest)

    swarm = GossamerCallback(
        manifest=options.manifest,
        join=options.join,
        listen=options.listen,
        folder=options.dir,
        stop_round=options.rounds,
    )
    trainer = AveragingTrainer(
        model,
        # Each node goes through the text in a different order.
        plan(max_steps=10_000, learning_rate=3e-3, data_seed=secrets.randbelow(2**32)),
        train_dataset=rows_of(train.upper()),
        eval_dataset=rows_of(held_out.upper()),
        callbacks=[swarm],
    )
    before = trainer.evaluate()["eval_loss"]
    with swarm:
        trainer.train()
    after = trainer.evaluate()
    trained, whole = model.get_nb_trainable_parameters()
    print(f"{trained:,} of {whole:,} parameters travel")
    print(f"held-out loss {before:.3f} -> {after['eval_loss']:.3f}, nats a byte")
    print(f"of the averaged model: {after['eval_loss_average']:.3f}")


if __name__ == "__main__":
    main()
