"""Images from tar shards, by webdataset: torchrun --nproc-per-node 2 original.py data/ --make-shards 8"""

import argparse
import glob
import os

import numpy as np
import torch
import torch.distributed as dist
import webdataset as wds
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="folder with train-000000.tar, train-000001.tar, ...")
    parser.add_argument("--make-shards", type=int, default=0, help="shards of generated images to write first")
    parser.add_argument("--images-per-shard", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps-per-epoch", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of each GPU")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shuffle", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_shards(args):
    """Bright squares on dark noise; the label is their colour and brightness."""
    rng = np.random.default_rng(args.seed)
    pattern = os.path.join(args.data, "train-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=args.images_per_shard, verbose=0) as sink:
        for index in range(args.make_shards * args.images_per_shard):
            label, (top, left) = int(rng.integers(4)), rng.integers(0, 16, 2)
            image = rng.integers(0, 60, (24, 24, 3), dtype=np.uint8)
            image[top : top + 8, left : left + 8, : label % 3 + 1] += np.uint8(60 * (label + 1) // 2)
            sink.write({"__key__": f"{index:08d}", "png": image, "cls": label})


def preprocess(image):
    return (image - 0.5) / 0.25


def make_loader(args):
    urls = sorted(glob.glob(os.path.join(args.data, "train-*.tar")))
    dataset = (
        wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node, seed=args.seed)
        .shuffle(args.shuffle)
        .decode("torchrgb")
        .to_tuple("png", "cls")
        .map_tuple(preprocess, lambda label: label)
        .batched(args.batch_size, partial=False)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=args.workers).repeat().with_epoch(args.steps_per_epoch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.features(x))


def train_one_epoch(model, loader, criterion, optimizer, epoch, device, args):
    model.train()
    running, correct, seen = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() * len(labels)
        correct += (output.argmax(1) == labels).sum().item()
        seen += len(labels)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {running / seen:.4f}, accuracy {correct / seen:.3f}")


def main():
    args = parse_args()
    dist.init_process_group()
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(args.seed)
    if args.make_shards and rank == 0 and not glob.glob(os.path.join(args.data, "train-*.tar")):
        os.makedirs(args.data, exist_ok=True)
        make_shards(args)
    dist.barrier()

    loader = make_loader(args)
    model = DistributedDataParallel(Net().to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        train_one_epoch(model, loader, criterion, optimizer, epoch, device, args)
        scheduler.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
