"""A diffusion model, unconditional, on Accelerate: accelerate launch original.py --output_dir=ddpm"""

import argparse
import copy
import math
import os

import torch
from accelerate import Accelerator
from torch import nn
from torchvision import datasets, transforms
from tqdm.auto import tqdm


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_data_dir", default=None, help="a folder of images; without it, fake ones")
    parser.add_argument("--fake_images", type=int, default=512)
    parser.add_argument("--output_dir", default="ddpm-model-32")
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--train_batch_size", type=int, default=16, help="of each device")
    parser.add_argument("--num_epochs", type=int, default=100)
    parser.add_argument("--dataloader_num_workers", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--lr_warmup_steps", type=int, default=500)
    parser.add_argument("--ema_max_decay", type=float, default=0.9999)
    parser.add_argument("--ddpm_num_steps", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--save_images_epochs", type=int, default=10)
    parser.add_argument("--checkpointing_steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class UNet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, 2, 1))
        self.middle = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(2 * channels, 3, 3, padding=1)
        self.dropout, self.channels = nn.Dropout(0.1), channels

    def forward(self, sample, timesteps):
        frequencies = torch.exp(-math.log(10_000) * torch.arange(self.channels // 2, device=sample.device))
        angles = timesteps[:, None] * frequencies
        embedding = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        skip = self.first(sample) + embedding
        hidden = self.middle(self.dropout(self.down(skip)))
        return self.last(torch.cat([self.up(hidden), skip], 1))


class DDPMScheduler:
    def __init__(self, num_train_timesteps):
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, num_train_timesteps), 0)

    def add_noise(self, images, noise, timesteps):
        alphas = self.alphas_cumprod.to(images.device)[timesteps][:, None, None, None]
        return alphas.sqrt() * images + (1 - alphas).sqrt() * noise


class EMAModel:
    def __init__(self, parameters, max_decay):
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.max_decay, self.optimization_step = max_decay, 0

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        decay = min(self.max_decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for shadow, parameter in zip(self.shadow_params, parameters):
            shadow.lerp_(parameter.to(shadow.device), 1 - decay)

    def copy_to(self, parameters):
        for shadow, parameter in zip(self.shadow_params, parameters):
            parameter.data.copy_(shadow)

    def state_dict(self):
        return {"optimization_step": self.optimization_step, "shadow_params": self.shadow_params}

    def load_state_dict(self, state_dict):
        self.optimization_step = state_dict["optimization_step"]
        for shadow, saved in zip(self.shadow_params, state_dict["shadow_params"]):
            shadow.copy_(saved)


def main(args):
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_dir=args.output_dir)
    torch.manual_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    model = UNet(args.channels)
    noise_scheduler = DDPMScheduler(args.ddpm_num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    augmentations = transforms.Compose(
        [
            transforms.Resize(args.resolution),
            transforms.CenterCrop(args.resolution),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    if args.train_data_dir is not None:
        dataset = datasets.ImageFolder(args.train_data_dir, augmentations)
    else:
        dataset = datasets.FakeData(args.fake_images, (3, args.resolution, args.resolution), 10, augmentations)
    train_dataloader = torch.utils.data.DataLoader(
        dataset, batch_size=args.train_batch_size, shuffle=True, num_workers=args.dataloader_num_workers
    )
    steps = len(train_dataloader) * args.num_epochs

    def rate(step):
        warmed = min(1.0, step / max(1, args.lr_warmup_steps))
        return warmed * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model = EMAModel(model.parameters(), args.ema_max_decay)

    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        progress_bar = tqdm(total=len(train_dataloader), disable=not accelerator.is_local_main_process)
        progress_bar.set_description(f"Epoch {epoch}")
        for clean_images, _ in train_dataloader:
            noise = torch.randn(clean_images.shape, device=clean_images.device)
            timesteps = torch.randint(0, args.ddpm_num_steps, (len(clean_images),), device=clean_images.device)
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)

            loss = nn.functional.mse_loss(model(noisy_images, timesteps), noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

            ema_model.step(model.parameters())
            progress_bar.update(1)
            global_step += 1
            if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            progress_bar.set_postfix(loss=loss.detach().item(), ema_step=ema_model.optimization_step)
        progress_bar.close()
        accelerator.wait_for_everyone()

        if accelerator.is_main_process and (epoch + 1) % args.save_images_epochs == 0:
            averaged = copy.deepcopy(accelerator.unwrap_model(model))
            ema_model.copy_to(averaged.parameters())
            torch.save(averaged.state_dict(), os.path.join(args.output_dir, "unet.pt"))


if __name__ == "__main__":
    main(parse_args())
