"""Loops on other frameworks that tests train: 7 batches an epoch, the last of them short; struck at an exact place."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets

from laststep import Run
from laststep.config.errors import ConfigError
from laststep.data.catalog import MNIST_5K
from laststep.loops.digest import digest
from laststep.ranks.launchers import VARIABLES
from tests.support.custom_loops import Struck


def synchronised(run: Run) -> None:
    """A script on Accelerate, which learns of other ranks from torchrun's variables alone. Each rank begins with its
    own weights, and prints those that it ends with."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(run.rank)
    model = accelerator.prepare(nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for images, labels in run.steps(run.loader(few_digits(train=True), 8), 3):
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
    place = {name: os.environ[name] for name in VARIABLES}
    found = {**place, "accelerator": f"{accelerator.process_index} of {accelerator.num_processes}"}
    line = json.dumps({**found, "weights": digest(model.state_dict())})
    print(f"synchronised {line}\n", end="", flush=True)  # in one piece, as mpirun mixes the ranks' output


def network() -> nn.Sequential:
    """With batch norm and dropout."""
    return nn.Sequential(nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 10))


def accelerate_accumulates(run: Run) -> None:
    """A loop on Accelerate with accelerator.accumulate: 4 steps an epoch, of 2 batches each, 1 in the last."""
    from accelerate import Accelerator

    strike(run)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = run.loader(few_digits(train=True), 8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.epochs(2):
        for images, labels in run.steps(loader, accumulate=2):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                run.log(loss=loss)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def fabric_accumulates(run: Run) -> None:
    """A loop on Fabric with no_backward_sync, likewise, and a validation."""
    from laststep.frameworks.fabric import Fabric

    strike(run)
    fabric = Fabric(run, accelerator="cpu")
    fabric.launch()
    model, optimizer = fabric.setup(plain := network(), torch.optim.AdamW(plain.parameters(), lr=0.01))
    val_loader = fabric.setup_dataloaders(DataLoader(few_digits(train=False), 4))
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        model.train()
        for images, labels in run.steps(run.loader(few_digits(train=True), 8), accumulate=2):
            with fabric.no_backward_sync(model, enabled=not run.sync_gradients):
                loss = nn.functional.cross_entropy(model(images), labels) / 2
                fabric.backward(loss)
            run.log(loss=2 * loss)
            if run.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        with torch.no_grad():
            for images, labels in run.validation(val_loader):
                losses.append(nn.functional.cross_entropy(model(images), labels))
        run.log(val_loss=fabric.all_reduce(torch.stack(losses).mean()))


def lightning_whole(run: Run) -> None:
    """Lightning's accumulate_grad_batches, with a datamodule and an averaged model."""
    from laststep.frameworks.lightning import Trainer
    from tests.frameworks.lightning_modules import Classifier, Digits, averages

    strike(run)
    trainer = Trainer(run, max_epochs=2, accumulate_grad_batches=2, callbacks=averages(), logger=False)
    trainer.fit(Classifier(), datamodule=Digits())


def lightning_manual(run: Run) -> None:
    """Lightning's manual optimisation, with two optimisers that take turns."""
    from laststep.frameworks.lightning import Trainer
    from tests.frameworks.lightning_modules import Digits, TwoOptimizers

    strike(run)
    trainer = Trainer(run, max_epochs=2, strategy="ddp_find_unused_parameters_true", logger=False)
    trainer.fit(TwoOptimizers(), datamodule=Digits())


def lightning_swa(run: Run) -> None:
    """Lightning's stochastic weight averaging from the second epoch on, with its last pass for batch norm."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from laststep.frameworks.lightning import Trainer
    from tests.frameworks.lightning_modules import Classifier, Digits

    strike(run)
    average = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
    Trainer(run, max_epochs=3, callbacks=[average], logger=False).fit(Classifier(), datamodule=Digits())


def lightning_sharded(run: Run) -> None:
    """Lightning's ModelParallelStrategy, with FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from laststep.frameworks.lightning import Trainer
    from tests.frameworks.lightning_modules import Digits, Sharded

    strike(run)
    strategy = ModelParallelStrategy(data_parallel_size=run.size, tensor_parallel_size=1)
    Trainer(run, max_epochs=2, strategy=strategy, accumulate_grad_batches=2, logger=False).fit(
        Sharded(), datamodule=Digits()
    )


def as_on_gpus(accelerator: Any) -> None:
    """Let Accelerate shard by FSDP2 on CPUs too, which it does on GPUs alone."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)


def accelerate_sharded(run: Run) -> None:
    """A loop on Accelerate with its FSDP2 plugin, and accumulation."""
    from accelerate import Accelerator

    strike(run)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    as_on_gpus(accelerator)
    model = nn.Sequential(nn.Linear(784, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for images, labels in run.steps(run.loader(few_digits(train=True), 8), accumulate=2):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                run.log(loss=loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()


def transformers_sharded(run: Run) -> None:
    """The Trainer of transformers with FSDP2."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from laststep.frameworks.transformers import follow

    strike(run)
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    plain = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    options = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    args = TrainingArguments(output_dir="gpt2", use_cpu=True, report_to="none", **options)
    trainer = Trainer(GPT2LMHeadModel(plain), args, train_dataset=few_lines(52))
    as_on_gpus(trainer.accelerator)
    trainer.is_fsdp_enabled = True
    follow(run, trainer)
    trainer.train()


def transformers_whole(run: Run) -> None:
    """The Trainer's gradient_accumulation_steps and load_best_model_at_end, and a subclass that counts for itself, with
    trainer.train() as it stands."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from laststep.frameworks.transformers import follow

    class Counting(Trainer):  # type: ignore[misc]
        """Counts as TRL's trainers do."""

        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more)
            self.tokens_trained = 0
            self.means: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}

        def compute_loss(self, model: nn.Module, inputs: Any, *words: Any, **more: Any) -> Any:
            mode = "train" if model.training else "eval"
            count = self.accelerator.gather(torch.tensor(inputs["input_ids"].numel())).sum().item()
            self.tokens_trained += count if model.training else 0
            self.means[mode]["tokens"].append(count)
            return super().compute_loss(model, inputs, *words, **more)

        def evaluate(self, *words: Any, **more: Any) -> Any:
            metrics = super().evaluate(*words, **more)
            run.log(tokens=self.tokens_trained, seen=len(self.means["train"]["tokens"]), flos=self.state.total_flos)
            return metrics

    strike(run)
    samples = few_lines(66)
    sizes = {"vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    args = TrainingArguments(
        output_dir="gpt2",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=3,
        learning_rate=0.02,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to="none",
    )
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = Counting(model, args, train_dataset=samples[14:], eval_dataset=samples[:14])
    follow(run, trainer)
    trainer.train()
    assert trainer.state.global_step == 8
    run.log(best=trainer.evaluate()["eval_loss"])  # that of the weights that were loaded


def tiny_language_model(width: int = 16) -> tuple[Any, Any]:
    """A language model of nine words, with the random weights that LASTSTEP_TEST_BASE says, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<eos>", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<eos>")
    sizes = {"vocab_size": 9, "n_positions": 16, "n_embd": width, "n_layer": 1, "n_head": 2}
    torch.manual_seed(int(os.environ.get("LASTSTEP_TEST_BASE", "1")))
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), tokenizer


# On two ranks 7 batches an epoch, and an evaluation that logs TRL's own counters.
TRL_OPTIONS = {
    "per_device_eval_batch_size": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "logging_steps": 3,
    "max_length": 16,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}


WIDTH = 64  # of the model that is fine-tuned: an adapter is small beside it
LORA = {"r": 2, "target_modules": ["c_attn"], "modules_to_save": ["ln_f"], "fan_in_fan_out": True}


def sft(run: Run) -> None:
    """TRL's supervised fine-tuning of a LoRA adapter of PEFT's, with accumulation."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from laststep.frameworks.transformers import follow

    strike(run)
    model, tokenizer = tiny_language_model(WIDTH)
    texts = [" ".join("abcdefgh"[: 2 + number % 6]) for number in range(44)]
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir="sft", **TRL_OPTIONS),
        train_dataset=Dataset.from_dict({"text": texts[:28]}),
        eval_dataset=Dataset.from_dict({"text": texts[28:]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA, lora_dropout=0.1),
    )
    follow(run, trainer)
    trainer.train()


def dpo(run: Run) -> None:
    """TRL's preference optimisation of a LoRA adapter: the reference is the model without it."""
    from peft import LoraConfig

    prefer(run, peft_config=LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def dpo_reference(run: Run) -> None:
    """Preference optimisation of a whole model, whose reference follows it every other step."""
    prefer(run, ref_model=tiny_language_model()[0], sync_ref_model=True, ref_model_sync_steps=2)


def prefer(run: Run, peft_config: Any = None, ref_model: Any = None, **options: Any) -> None:
    """Train by TRL's DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from laststep.frameworks.transformers import follow

    strike(run)
    model, tokenizer = tiny_language_model()
    words = "abcdefgh"
    pairs = {
        "prompt": [" ".join(words[n % 4 :][:3]) for n in range(44)],
        "chosen": [f" {words[n % 8]}" for n in range(44)],
        "rejected": [f" {words[(n + 3) % 8]} a" for n in range(44)],
    }
    trainer = DPOTrainer(
        model,
        ref_model,
        DPOConfig(output_dir="dpo", learning_rate=0.01, **TRL_OPTIONS, **options),
        train_dataset=Dataset.from_dict({name: each[:28] for name, each in pairs.items()}),
        eval_dataset=Dataset.from_dict({name: each[28:] for name, each in pairs.items()}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    follow(run, trainer)
    trainer.train()


def lightning_saves(run: Run) -> None:
    """Callbacks of Lightning's that save checkpoints: of the script, and of its module."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from laststep.frameworks.lightning import Trainer
    from tests.frameworks.lightning_modules import Digits, SavesToo

    os.chdir(run.config.launch.root)
    callbacks = [ModelCheckpoint("theirs"), ModelCheckpoint("theirs", save_last=True)]
    trainer = Trainer(run, max_epochs=1, callbacks=callbacks, enable_checkpointing=True, logger=False)
    trainer.fit(SavesToo(), datamodule=Digits())


LIGHTNING_REFUSES: dict[str, Any] = {
    "strategy": "fsdp",
    "reload_dataloaders_every_n_epochs": 2,
    "max_time": "00:01:00:00",
    "max_epochs": -1,
}
TRANSFORMERS_REFUSES: dict[str, Any] = {
    "auto_find_batch_size": True,
    "enable_jit_checkpoint": True,
}


def refused(run: Run) -> None:
    """Prints what each adapter says of settings with which a run would not resume exactly."""
    from transformers import Trainer, TrainingArguments

    from laststep.frameworks import lightning, transformers

    for name, value in LIGHTNING_REFUSES.items():
        try:
            lightning.Trainer(run, **{name: value})
        except ConfigError as error:
            print("refused:", error, flush=True)
    for name, value in TRANSFORMERS_REFUSES.items():
        args = TrainingArguments(use_cpu=True, report_to="none", **{name: value})
        try:
            transformers.train(run, Trainer(nn.Linear(1, 1), args, train_dataset=[{"x": 0}]))
        except ConfigError as error:
            print("refused:", error, flush=True)


def strike(run: Run) -> None:
    """Be struck in the place that LASTSTEP_TEST_SIGNAL says: a backward pass, or a batch of a validation."""
    os.chdir(run.config.launch.root)  # where frameworks write their own logs
    struck, backward = Struck(run), torch.Tensor.backward

    def strike_backward(*words: Any, **more: Any) -> None:
        struck.strike("step")
        backward(*words, **more)

    def strike_validation(loader: Any) -> Iterator[Any]:
        for batch in Run.validation(run, loader):
            struck.strike("validation")
            yield batch

    torch.Tensor.backward = strike_backward  # type: ignore[method-assign]
    run.validation = strike_validation  # type: ignore[method-assign, assignment]


def few_digits(train: bool) -> TensorDataset:
    """52 images to train on, of which 4 are left for the last batch of an epoch, and 40 to validate with."""
    images = datasets.MNIST(MNIST_5K, train=train)
    few = slice(52 if train else 40)
    return TensorDataset(images.data[few].flatten(1) / 255, images.targets[few])


def few_lines(count: int) -> list[dict[str, Tensor]]:
    """Lines of English text, 16 bytes long, for a language model."""
    text = bytearray("\n".join(topics.values()).encode()[: count * 16])
    return [
        {"input_ids": line, "labels": line} for line in torch.frombuffer(text, dtype=torch.uint8).long().view(-1, 16)
    ]
