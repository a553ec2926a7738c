"""Exchange of values between stages: messages made from a stage's values and turned back into them.

A message holds, for the samples that sender and receiver share, the values of one edge in the order of the stage
program. Where both stages are on one rank the values go into the mailbox directly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import Compute, Message, Pass, Program, Recv, Samples, Send
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.mailbox import Letter, Mailbox, PendingReceive
from lightning_pipe.runtime.exchanges.sized_messages import SizedMessage, SizedReceive, SizedSend, tensors_of
from lightning_pipe.runtime.exchanges.slicing import Content, compact, cut, from_tensor, join, packed, to_tensor
from lightning_pipe.runtime.record import Recorder
from lightning_pipe.runtime.stage import Ahead, Sends, Stage
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle, Wait, Walk

_WAYS: tuple[Pass, ...] = ("F", "B")


class Exchange:
    """Move values between the stages of this rank and their neighbours.

    Args:
        split: values of the edges.
        stages: stages of this rank by number.
        transport: its channels must be open.
        device: where values live.

    Attributes:
        sizes, batch_samples: samples of the micro-batches and of the batch, once a program has begun.
    """

    sizes: tuple[int, ...]
    batch_samples: int

    def __init__(
        self, split: Split, stages: Mapping[int, Stage], *, transport: Transport, device: torch.device
    ) -> None:
        self._split = split
        self._stages = stages
        self._transport = transport
        self._device = device
        self._mailbox = Mailbox()
        self._sends: deque[tuple[Send, Handle]] = deque()
        self._late: dict[int, SizedReceive] = {}  # by sender: the last receive that had to wait for sizes
        self._receiving = 0  # messages that no compute has waited for
        self._is_queued = False  # whether a device may still carry messages that were waited for
        self._program: Program | None = None
        self._sources = {
            (number, way): [(source, names) for (direction, source), names in found if direction == way]
            for number, stage in stages.items()
            for found in [stage.program.receives.items()]
            for way in _WAYS
        }

    def begin(
        self,
        program: Program,
        recorder: Recorder,
        *,
        most_messages: int | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Forget everything under way, and tell the stages what will be fetched from them.

        Args:
            program: the program.
            recorder: of its instructions.
            ahead: of a round whose forwards run ahead: what is in flight stays.
            most_messages: how many messages may be under way beside a compute, sends and receives together; None for
                any number.
        """
        self._recorder, self._most_messages = recorder, most_messages
        if ahead is None or ahead.passed is None:
            self._mailbox.clear()
        else:
            self._mailbox.pass_on(ahead.passed, posted=recorder.mark())
        self._sends.clear()
        self._late.clear()
        self._receiving, self._is_queued = len(self._mailbox.left()), False
        if program is not self._program:
            self._prepare(program)
        for number, stage in self._stages.items():
            stage.begin(self._expected[number], training=program.training, ahead=ahead)

    def _prepare(self, program: Program) -> None:
        """Find what is the same whenever a program runs."""
        self._program = program
        self.sizes = program.sizes[: program.batch]
        self.batch_samples = sum(self.sizes)
        layout, rank = program.layout, self._transport.rank
        self._local = {
            (stage, m): layout.samples(stage, layout.stages[stage].index(rank), m, size)
            for stage in self._stages
            for m, size in enumerate(program.sizes)
        }
        self._own = {(stage, m): self._own_messages(program, stage, m) for stage, m in self._local}
        self._expected = {stage: self._expected_sends(program, stage) for stage in self._stages}

    @property
    def is_under_way(self) -> bool:
        """Return whether a message may be under way: the last ones may have landed since this rank looked.

        On a device, those that were waited for may be under way until the host has seen the device come so far.
        """
        return bool(self._sends or self._receiving or self._is_queued)

    def local(self, stage: int, microbatch: int) -> Samples:
        """Return the samples of a micro-batch that this rank's replica of a stage computes."""
        return self._local[stage, microbatch]

    def send(self, send: Send) -> None:
        """Post a message from a stage of this rank."""
        parts = self._parts(send.message)
        contents = [to_tensor(content, device=self._device) for content in parts.values()]
        self._post(send, self._form_of(send.message, parts), contents)

    def _form_of(self, message: Message, names: Iterable[str]) -> SizedMessage:
        """Return what is known of a message of these values before it comes."""
        of = self._batch_of(message.microbatch)
        values = tuple([self._split.values[name] for name in names])
        return SizedMessage(values, len(message.samples), of, self._device)

    def _post(self, send: Send, form: SizedMessage, contents: Sequence[torch.Tensor]) -> None:
        self._is_queued = self._transport.device is not None
        sizes = self._transport.send([form.sizes_of(contents)], peer=send.peer) if form.has_sizes else None
        tensors = [packed(content, value) for content, value in zip(contents, form.values, strict=True)]
        handle = self._transport.send(tensors, peer=send.peer)
        self._sends.append((send, handle if sizes is None else SizedSend(sizes, handle)))

    def _make_room(self) -> Walk[None]:
        """Wait for the oldest sends while more messages are under way than may be beside a compute."""
        most = self._most_messages
        while most is not None and self._sends and len(self._sends) + self._receiving > most:
            yield from self._finish_send()

    def _finish_send(self) -> Walk[None]:
        """Wait for the oldest message under way: its memory is used again behind it."""
        send, handle = self._sends.popleft()
        yield Wait(handle, send)

    def receive(self, receive: Recv) -> None:
        """Post the receiving of a message for a stage of this rank."""
        message = receive.message
        names = self._stages[message.target].program.receives[message.direction, message.source]
        form, earlier = self._form_of(message, names), self._late.get(receive.peer)
        if form.has_sizes or (earlier is not None and not earlier.is_posted):
            buffers: tuple[torch.Tensor, ...] = ()
            self._late[receive.peer] = SizedReceive(form, self._transport, receive.peer, behind=earlier)
            handle: Handle = self._late[receive.peer]
        else:
            buffers = form.buffers()
            handle = self._transport.receive(form.views(buffers), peer=receive.peer, owners=buffers)
        self._receiving += 1
        self._is_queued = self._transport.device is not None
        self._mailbox.put(PendingReceive(message, buffers, receive, handle, self._recorder.mark()))

    def _batch_of(self, microbatch: int) -> int:
        """Return the samples of the batch of a micro-batch; behind this batch others follow that are cut like it."""
        count = len(self.sizes)
        first = microbatch // count * count
        return sum(self._program.sizes[first : first + count]) if self._program is not None else 0

    def _let_go(self) -> None:
        """Forget sends that have landed: their handles keep memory."""
        if self._sends:
            self._sends = deque((send, handle) for send, handle in self._sends if not handle.landed())

    def collect(self, compute: Compute) -> Walk[None]:
        """Wait for the letters that a compute needs and give their contents to its stage."""
        self._let_go()
        if compute.kind != "W":
            yield from self._take(compute)
        yield from self._make_room()

    def _take(self, compute: Compute) -> Walk[None]:
        stage = self._stages[compute.stage]
        direction: Pass = "F" if compute.kind == "F" else "B"
        for source, names in self._sources[compute.stage, direction]:
            letters = self._mailbox.take((direction, source, compute.stage, compute.microbatch))
            for letter in letters:
                if isinstance(letter, PendingReceive):
                    yield Wait(letter.handle, letter.receive)
                    self._receiving -= 1
                    self._recorder.add(letter.receive, letter.posted)
            if letters:
                stage.receive(compute.microbatch, self._joined(names, letters, compute))

    def hand_over(self, compute: Compute) -> None:
        """Put what a compute produced for stages on this rank into the mailbox."""
        if compute.kind == "W":
            return
        direction: Pass = "F" if compute.kind == "F" else "B"
        for message in self._own[compute.stage, compute.microbatch]:
            if message.direction == direction:
                tensors = [
                    compact(to_tensor(content, device=self._device)) for content in self._parts(message).values()
                ]
                self._mailbox.put(Letter(message, tuple(tensors)))

    def finish_sends(self) -> Walk[None]:
        """Wait until every message posted has left."""
        while self._sends:
            yield from self._finish_send()

    def give_up(self, rest: Sequence[Send | Recv]) -> Walk[None]:
        """Bring everything under way to rest: post the ends that are missing, with nothing in them, and wait for all.

        Args:
            rest: these ends (`runtime.abort_program`).
        """
        for end in rest:
            match end:
                case Send(message):
                    names = self._stages[message.source].program.sends[message.direction, message.target]
                    form = self._form_of(message, names)
                    self._post(end, form, form.buffers(form.no_sizes))
                case Recv():
                    self.receive(end)
        yield from self.finish_sends()
        yield from self._finish_receives()

    def give_up_flight(self) -> Walk[None]:
        """Wait for the messages of forwards in flight, whose memory is being written, and forget these forwards."""
        yield from self._finish_receives()
        self._mailbox.clear()
        for stage in self._stages.values():
            stage.give_up_flight()

    def finish(self) -> Walk[None]:
        """Wait until everything posted for the batch has really happened.

        Raises:
            PipelineError: if a message was received that no compute has taken, or a value is still held.
        """
        assert self._program is not None
        batch = self._program.batch
        yield from self.finish_sends()
        yield from self._finish_receives(batch=batch)
        left = self._mailbox.left(batch=batch)
        letters = [str(letter.receive if isinstance(letter, PendingReceive) else letter.message) for letter in left]
        values = [f"stage {number}, {name}" for number, stage in self._stages.items() for name in stage.left(batch)]
        if letters or values:
            raise PipelineError(
                f"Rank {self._transport.rank} ended its program with letters {letters} and values {values} unused. "
                "The program and the split do not fit each other."
            )

    def _finish_receives(self, *, batch: int | None = None) -> Walk[None]:
        """Wait for the letters that nobody has taken, all or those of the batch."""
        for letter in self._mailbox.left(batch=batch):
            if isinstance(letter, PendingReceive):
                yield Wait(letter.handle, letter.receive)
        self._receiving = 0
        yield Wait(self._transport.reached(), "what its device was told")
        self._is_queued = False

    def _expected_sends(self, program: Program, stage: int) -> Sends:
        messages = [
            instruction.message
            for instruction in program.ranks[self._transport.rank]
            if isinstance(instruction, Send) and instruction.message.source == stage
        ]
        own = [message for m in range(len(program.sizes)) for message in self._own[stage, m]]
        return Counter((message.direction, message.target, message.microbatch) for message in [*messages, *own])

    def _own_messages(self, program: Program, stage: int, microbatch: int) -> list[Message]:
        """List the messages from a stage of this rank to others that are on this rank too."""
        targets = [
            (direction, target)
            for direction, target in self._stages[stage].program.sends
            if target in self._stages and (direction == "F" or program.training)
        ]
        shared = [(self.local(stage, microbatch) & self.local(target, microbatch)) for _, target in targets]
        return [
            Message(direction, stage, target, microbatch, samples)
            for (direction, target), samples in zip(targets, shared, strict=True)
            if len(samples)
        ]

    def _parts(self, message: Message) -> dict[str, Content]:
        """Take a message's values from its stage, and of each the part for the message's samples."""
        stage = self._stages[message.source]
        local = self.local(message.source, message.microbatch)
        contents = stage.outgoing(message.direction, message.target, message.microbatch)
        if message.samples == local:
            return contents
        return {name: self._part(name, content, local, message) for name, content in contents.items()}

    def _part(self, name: str, content: Content, local: Samples, message: Message) -> Content:
        if not isinstance(content, torch.Tensor):
            return content
        value = self._split.values[name]
        return cut(content, value, local=local, part=message.samples)

    def _joined(self, names: tuple[str, ...], letters: tuple[Letter, ...], compute: Compute) -> dict[str, Content]:
        """Join the parts of every value; letters hold tensors in the order of `names`."""
        local = self.local(compute.stage, compute.microbatch)
        columns = zip(*map(tensors_of, letters), strict=True)
        joined: dict[str, Content] = {}
        for name, tensors in zip(names, columns, strict=True):
            value = self._split.values[name]
            parts = [(letter.message.samples, tensor) for letter, tensor in zip(letters, tensors, strict=True)]
            joined[name] = from_tensor(join(parts, value, local=local), value)
        return joined
