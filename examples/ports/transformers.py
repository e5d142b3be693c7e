"""transformers_before.py, ported: laststep --nodes 2 task=examples.ports.transformers.main"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from examples.ports.data import text
from laststep import Run
from laststep.frameworks.transformers import follow

EPOCHS, BATCH_SIZE, BLOCK = 1, 8, 64


def main(run: Run) -> None:
    lines = text()[: 400 * BLOCK].view(-1, BLOCK)
    samples = [{"input_ids": line, "labels": line} for line in lines]
    sizes = {"vocab_size": 256, "n_positions": BLOCK, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir="gpt2",
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=samples[40:], eval_dataset=samples[:40])
    follow(run, trainer)
    trainer.train()
