"""A script with checkpoints of its own, which does not know Laststep: laststep --nodes 2 train.py --epochs 20"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default=os.environ.get("LASTSTEP_FOLDER", "output"))
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--batch-size", type=int, default=64, help="of each GPU")
parser.add_argument("--lr", type=float, default=0.1)
stopped = False


def on_sigterm(number, frame):
    global stopped
    stopped = True


def save(path, model, optimizer, scheduler, epoch):
    """Beside the old one first: a job that is killed while it saves leaves the old one whole."""
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": epoch,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def wants_stop(device):
    """Whether any rank has got SIGTERM: all of them must leave the loop after the same batch."""
    flag = torch.tensor(float(stopped), device=device)
    dist.all_reduce(flag)
    return bool(flag)


def main():
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    os.makedirs(args.output_dir, exist_ok=True)
    latest = os.path.join(args.output_dir, "latest.pt")

    torch.manual_seed(0)
    x = torch.randn(args.samples, 16)
    dataset = TensorDataset(x, (x.square().sum(1) > 16).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    first = 0
    if os.path.exists(latest):
        state = torch.load(latest, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"]
    if rank == 0:
        print(f"begins with epoch {first}", flush=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if wants_stop(device):
                if rank == 0:
                    save(latest, model, optimizer, scheduler, epoch)  # this epoch is done again
                dist.destroy_process_group()
                sys.exit(0)
        scheduler.step()
        if rank == 0:
            save(latest, model, optimizer, scheduler, epoch + 1)
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
