"""Supervised fine-tuning with TRL: torchrun --nproc-per-node 2 original.py --gradient_accumulation_steps 2"""

from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class ScriptArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Without it, small sums."})
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    samples: int = field(default=1024, metadata={"help": "The number of sums to train on."})
    hidden_size: int = field(default=64, metadata={"help": "Of the model that is made where none is named."})


def sums(count):
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    digits = [(number % 10, number // 10 % 10) for number in range(0, 7 * count, 7)]
    texts = [f"What is {words[a]} plus {words[b]} ? {words[(a + b) % 10]}" + " !" * (a % 3) for a, b in digits]
    return Dataset.from_dict({"text": texts})


def word_tokenizer(dataset):
    seen = sorted({word for text in dataset["text"] for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *seen])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main(script_args, training_args, model_args):
    set_seed(training_args.seed)
    if script_args.dataset_name is not None:
        dataset = load_dataset(script_args.dataset_name)
    else:
        dataset = DatasetDict(train=sums(script_args.samples), test=sums(script_args.samples // 4))

    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.dtype)
    else:
        tokenizer = word_tokenizer(dataset[script_args.dataset_train_split])
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=script_args.hidden_size,
            intermediate_size=2 * script_args.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            attention_dropout=0.1,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = LlamaForCausalLM(config)

    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    main(*parser.parse_args_and_config())
