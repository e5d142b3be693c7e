"""Whether two sentences say the same, on Accelerate: accelerate launch --num_processes 2 original.py"""

import argparse
import os
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

EVAL_BATCH_SIZE = 32
SUBJECTS, VERBS, OBJECTS = ["cat", "dog", "bird"], ["sees", "hears", "likes", "finds"], ["lake", "house", "road"]
WORDS = ["[pad]", "[sep]", *SUBJECTS, *VERBS, *OBJECTS]


def sentence_pairs(count, seed):
    draw, pairs = random.Random(seed), []
    for _ in range(count):
        first = [draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)]
        label = draw.randrange(2)
        second = first if label else [draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)]
        tokens = [*first, "[sep]", *second[: draw.randint(2, 3)]]
        pairs.append({"input_ids": [WORDS.index(word) for word in tokens], "labels": label})
    return pairs


def get_dataloaders(args, batch_size):
    datasets = {"train": sentence_pairs(args.samples, 1), "validation": sentence_pairs(args.samples // 4, 2)}

    def collate_fn(examples):
        longest = max(len(example["input_ids"]) for example in examples)
        padded = [example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples]
        return {"input_ids": torch.tensor(padded), "labels": torch.tensor([example["labels"] for example in examples])}

    train_dataloader = DataLoader(datasets["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(datasets["validation"], collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(WORDS), width, padding_idx=0), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(width, 2)

    def forward(self, input_ids):
        hidden = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        return self.classify(self.encoder(hidden, src_key_padding_mask=input_ids == 0).mean(1))


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def rate(step):
        if step < num_warmup_steps:
            return step / num_warmup_steps
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, rate)


def training_function(config, args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    lr, num_epochs, seed, batch_size = config["lr"], config["num_epochs"], config["seed"], config["batch_size"]
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(args, batch_size)
    model = Classifier(args.width)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=10,
        num_training_steps=(len(train_dataloader) * num_epochs) // args.gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"])
                loss = nn.functional.cross_entropy(logits, batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct, seen = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["input_ids"]).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.3f} of {seen}")
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--checkpointing_steps", default=None, help="'epoch' to save the state after each epoch.")
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    config = {"lr": 1e-3, "num_epochs": args.num_epochs, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()
