"""Run generated Gluon kernels on the CPU: every role a thread, every hand-over checked.

Triton's interpreter knows no Gluon. Here the text of a generated module is executed as it stands,
on torch tensors, by a machine that has Hopper's asynchronous parts: mbarriers, TMA, WGMMA, warp
specialisation, inline PTX. Who goes on next, and when a copy or a product in flight is done, is
drawn at random from a seed, so that a few runs try many orders; a buffer is NaN while TMA fills it.
A program in which everybody waits raises `DeadlockError`.

What it does not show: speed, registers, layouts that cannot be converted, and races among the
threads of one warpgroup. Those are the compiler's to say.
"""

from flashgen.emulator.load import emulated
from flashgen.emulator.machine import DeadlockError, HandOverError

__all__ = ["DeadlockError", "HandOverError", "emulated"]
