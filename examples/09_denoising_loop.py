"""09: A denoising loop: one graph for every step, because all have the same shapes.

Without sizes that vary there is nothing to pad and nothing to declare: ``examples`` shows two
calls, the first is captured, the second is compared with eager before the graph serves. The loop
and the model stay as they are.

Output::

    20 steps on (2, 4, 16, 16)
    equal to eager: True
"""

import torch
from torch import nn

from graphrt import CUDAGraphRunner


class Denoiser(nn.Module):
    """Stands for a U-Net or a diffusion transformer."""

    def __init__(self):
        super().__init__()
        self.clock = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
        self.before, self.after = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x, time):
        """The noise in ``x`` [batch, 4, height, width] at ``time`` [batch, 1], of its shape."""
        hidden = self.before(x) + self.clock(time)[:, :, None, None]
        return self.after(torch.relu(hidden))


def denoise(model, x, num_steps):
    for step in range(num_steps):
        time = torch.full((len(x), 1), 1 - step / num_steps, device=x.device)
        x = x - model(x=x, time=time) / num_steps
    return x


def denoise_on_a_graph(model, x, num_steps):
    def examples(sizes, seed):
        return {"x": torch.randn_like(x), "time": x.new_full((len(x), 1), 1 / (1 + seed))}

    with CUDAGraphRunner(model, examples=examples) as runner:
        runner.capture()
        return denoise(lambda **values: runner.run(values), x, num_steps)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoiser().to(device).requires_grad_(False)
    noise = torch.randn(2, 4, 16, 16, device=device)
    print("20 steps on", tuple(noise.shape))
    image = denoise_on_a_graph(model, noise, num_steps=20)
    print("equal to eager:", torch.equal(image, denoise(model, noise, num_steps=20)))


if __name__ == "__main__":
    main()
