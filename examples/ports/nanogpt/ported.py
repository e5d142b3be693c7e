"""A language model as nanoGPT trains it: torchrun --nproc-per-node 2 original.py --max_iters=2000 --n_embd=128"""

import ast
import math
import os
import sys
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import laststep

run = laststep.run()
# settings, which --name=value replaces
out_dir = "out"
eval_interval, log_interval, eval_iters = 200, 10, 20
data_file = __file__  # any text
gradient_accumulation_steps = 4  # of all ranks together
batch_size, block_size = 12, 64
n_layer, n_head, n_embd, dropout = 4, 4, 128, 0.1
learning_rate, max_iters, weight_decay, grad_clip = 1e-3, 2000, 1e-1, 1.0
warmup_iters, lr_decay_iters, min_lr = 100, 2000, 1e-4
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    if key not in globals():
        raise SystemExit(f"no such setting: {key}")
    globals()[key] = value if isinstance(globals()[key], str) else ast.literal_eval(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group()
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    master_process = ddp_rank == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_rank, device, master_process = 0, "cuda" if torch.cuda.is_available() else "cpu", True
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + ddp_rank)

tokens = torch.frombuffer(bytearray(open(data_file, "rb").read()), dtype=torch.uint8).long()
train_data, val_data = tokens[: int(0.9 * len(tokens))], tokens[int(0.9 * len(tokens)) :]


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        block = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(block, n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        logits = self.lm_head(self.h(x, mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


iter_num = 0
best = {"val_loss": 1e9}
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    out = {}
    raw_model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = raw_model(*get_batch(split))[1].item()
        out[split] = losses.mean().item()
    raw_model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min((it - warmup_iters) / max(lr_decay_iters - warmup_iters, 1), 1.0)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


run.restore(model=model, optimizer=optimizer, best=run.own(best=best))
t0 = time.time()
for iter_num in run.steps(count=max_iters):
    X, Y = get_batch("train")
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best["val_loss"]:
            best["val_loss"] = losses["val"]
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")  # the next one, while the GPU computes
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0 and master_process:
        dt, t0 = time.time() - t0, time.time()
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time {dt * 1000:.2f}ms")
    iter_num += 1

if ddp:
    destroy_process_group()
