"""A program's roles, and what goes on beside them: who runs next is drawn from a seed.

Exactly one thread runs at a time. It hands over at every barrier, copy and product; there, copies
in flight may also complete. Barriers are PTX's mbarriers (PTX ISA, "Parallel Synchronization and
Communication Instructions: mbarrier"): a phase ends when all arrivals are in and all announced
bytes have come.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flashgen.emulator.values import Value


class DeadlockError(Exception):
    """Every role waits, and nothing is in flight that could end it."""


class HandOverError(Exception):
    """A barrier, buffer or product used as the hardware does not allow."""


@dataclass
class Barrier:
    """An mbarrier: `phase` counts those that ended."""

    arrivals: int
    missing: int = field(init=False)
    bytes_due: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.missing = self.arrivals

    def arrive(self, count: int = 1) -> None:
        if self.missing < count:
            raise HandOverError(f"a barrier of {self.arrivals} arrivals got one too many")
        self.missing -= count
        self._end_phase()

    def expect(self, num_bytes: int) -> None:
        """Announce bytes, and arrive."""
        self.bytes_due += num_bytes
        self.arrive()

    def receive(self, num_bytes: int) -> None:
        self.bytes_due -= num_bytes
        self._end_phase()

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of this parity is over, as `mbarrier.try_wait.parity` says it."""
        return self.phase % 2 != parity

    def _end_phase(self) -> None:
        if self.missing == 0 and self.bytes_due == 0:
            self.phase += 1
            self.missing = self.arrivals


class Product:
    """A WGMMA in flight: reads its operands at some time until it is waited for."""

    def __init__(self, compute: Callable[[], Value]) -> None:
        self._compute = compute
        self._result: Value | None = None

    def complete(self) -> None:
        if self._result is None:
            self._result = self._compute()

    @property
    def result(self) -> Value:
        if self._result is None:
            raise HandOverError("a product is used before it was waited for")
        return self._result


class Role:
    """A thread of the program, with what it has in flight."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Lock()  # held until somebody gives the turn to this role
        self.turn.acquire()
        self.waits_for: Callable[[], bool] | None = None
        self.doing = ""
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.unfenced: list[object] = []  # shared memory written, and not yet shown to TMA
        self.is_done = False

    @property
    def can_run(self) -> bool:
        return not self.is_done and (self.waits_for is None or self.waits_for())


class Machine:
    """One program at a time. seed: of the order of everything that has no order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.main = Role("before the roles")
        self.roles: list[Role] = [self.main]
        self.current = self.main
        self.copies: list[Callable[[], None]] = []  # loads of TMA in flight
        self.error: BaseException | None = None

    # ---- what a role does

    def switch(self) -> None:
        """Anybody who can may go on."""
        self._progress()
        self._hand_over(self.current)

    def wait_until(self, condition: Callable[[], bool], doing: str) -> None:
        self.switch()
        role = self.current
        role.waits_for, role.doing = condition, doing
        while not condition():
            self._hand_over(role)
        role.waits_for = None

    def start_product(self, product: Product) -> None:
        """Half of them are done at once with all before them, half when they are waited for."""
        self.current.products.append(product)
        if self.random.random() < 0.5:
            for each in self.current.products:
                each.complete()
        self.switch()

    def complete_products(self, outstanding: int) -> None:
        """Products of the current role end in order, until so many are left."""
        products = self.current.products
        while len(products) > outstanding:
            products.pop(0).complete()

    def complete_stores(self, outstanding: int) -> None:
        """Copies from shared memory end in order, until so many are left."""
        stores = self.current.stores
        while len(stores) > outstanding:
            stores.pop(0)()

    def fence(self) -> None:
        """TMA sees what the current role has written to shared memory."""
        self.current.unfenced.clear()

    def run_roles(self, bodies: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run all to their ends; the first error of any is raised here."""
        self.roles = [Role(name) for name, _ in bodies]
        threads = [
            threading.Thread(target=self._live, args=(role, body), daemon=True)
            for role, (_, body) in zip(self.roles, bodies, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.current = self.random.choice(self.roles)
        self.current.turn.release()
        for thread in threads:
            thread.join()
        self.current = self.main
        if self.error is not None:
            raise self.error
        for copy in self.copies:
            copy()
        self.copies.clear()

    # ---- turns

    def _live(self, role: Role, body: Callable[[], None]) -> None:
        role.turn.acquire()
        self.current = role
        try:
            if self.error is None:
                body()
                self._check_end(role)
        except BaseException as error:
            self.error = self.error or error
        role.is_done = True
        self._pass_on()

    def _check_end(self, role: Role) -> None:
        if role.products:
            raise HandOverError(f"{role.name} ends with products that nobody waited for")
        self.complete_stores(0)

    def _hand_over(self, role: Role) -> None:
        self._pass_on()
        role.turn.acquire()  # at once where it is this role's turn again
        self.current = role
        if self.error is not None:
            raise self.error

    def _pass_on(self) -> None:
        """Give the turn to a role that can run; all of them, to end, after an error."""
        left = [each for each in self.roles if not each.is_done]
        if not left:
            return
        while self.error is None:
            ready = [each for each in left if each.can_run]
            if ready:
                self.random.choice(ready).turn.release()
                return
            if not self._complete_something():
                waits = "; ".join(f"{each.name} waits for {each.doing}" for each in left)
                self.error = DeadlockError(waits)
        left[0].turn.release()

    def _progress(self) -> None:
        while self.copies and self.random.random() < 0.3:
            self._complete_something()

    def _complete_something(self) -> bool:
        if not self.copies:
            return False
        self.copies.pop(self.random.randrange(len(self.copies)))()
        return True
