"""Session of one fit (or validate, test, predict): all that lives from setup to teardown.

Weights, data, the pipeline and the optimizer's groups of one rank. In a fit the plan is made in setup, from a look at
the first batch; elsewhere by the first batch itself, which every rank loads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_pipe.capture import Structure, flatten
from lightning_pipe.capture.python.state_slots import TRANSFER_HOOKS
from lightning_pipe.capture.steps.batch import same_besides_tensors
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.torch_private import forget_traces, traces_made
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import BatchError, PipeError, StepError, UnsupportedError
from lightning_pipe.freed_memory import freed_memory_kept
from lightning_pipe.lightning_names import (
    CombinedLoader,
    Precision,
    callbacks_of,
    is_overridden,
    is_param_in_hook_signature,
    isolate_rng,
    pl,
    rank_zero_info,
)
from lightning_pipe.report import Comparison
from lightning_pipe.runtime.memory import held_to
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.schedule.rounds import delays_of
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.gradients.clipping import Clipper
from lightning_pipe.strategy.gradients.gradient_hooks import GradientHooks
from lightning_pipe.strategy.gradients.loss_scale import LossScale
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.gradients.step_in_parts import can_step_in_parts
from lightning_pipe.strategy.gradients.unsummed import sum_gradients
from lightning_pipe.strategy.loading.ahead import AheadBatch, AheadBatches, batches_left, copied, steps_before
from lightning_pipe.strategy.loading.asked_early import AskedEarly, EarlyCall
from lightning_pipe.strategy.loading.batch_loading import Awaited, Feed
from lightning_pipe.strategy.loading.first_batch import early_loaders, forget_loaders, look_where_iterated, peek
from lightning_pipe.strategy.loading.left_by_hooks import LeftByHooks, LeftForTurn
from lightning_pipe.strategy.parameters.averages import Averages, Connected
from lightning_pipe.strategy.parameters.inner_optimizers import inner_optimizers
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.parameters.replaced import ParameterWatch
from lightning_pipe.strategy.parameters.restoring import whole_ranks
from lightning_pipe.strategy.parameters.sharding import SharedState
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.pipeline import Pipeline
from lightning_pipe.strategy.plans.first_steps import FirstSteps
from lightning_pipe.strategy.plans.logged_rows import PipeLog
from lightning_pipe.strategy.plans.plan_report import introduce
from lightning_pipe.strategy.plans.plan_warnings import warn_of_backward_hooks
from lightning_pipe.strategy.plans.recording import Recording
from lightning_pipe.strategy.plans.second_plan import steps_left
from lightning_pipe.strategy.plans.watched_steps import StepWatch
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.ranks.limit import Foreseen
from lightning_pipe.strategy.start.stopwatch import Stopwatch
from lightning_pipe.strategy.steps.metrics import MetricsAlone, replay
from lightning_pipe.strategy.steps.step_calls import (
    TRAINING,
    FollowingBatch,
    RunOptions,
    StepRequest,
    StepResult,
    StepSaid,
    answers_of,
    step_contexts,
)
from lightning_pipe.strategy.steps.step_capture import RankSetup
from lightning_pipe.strategy.versions.predicted_weights import PredictedWeights

_AFTER_BACKWARD = "on_after_backward"


class Session:
    """One rank's part of one run of the trainer.

    Args:
        module: the user's module, whole and on the host.
        config: options.
        links: to the other ranks.
        feed: who loads.
        plugin: precision of the trainer.
        device: where this rank computes.
        connected: opens connections to the other ranks, after the fit too.
        stopwatch: measures how long the start takes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        config: DappleConfig,
        links: Connections,
        feed: Feed,
        plugin: Precision,
        device: torch.device,
        connected: Connected,
        stopwatch: Stopwatch,
    ) -> None:
        self._module, self._config, self._links, self._feed = module, config, links, feed
        self._plugin, self._device, self._stopwatch = plugin, device, stopwatch
        self.weights = Weights(module, links.control)
        self._later = (
            PostValidation(links.control.wait, is_last=lambda: _is_last_batch(module.trainer))
            if config.post_validation and links.control.ranks > 1
            else None
        )
        self._stop: bool | None = None
        self.groups: list[Groups] = []
        self._optimizers: list[Optimizer] = []
        self._shared_states: list[SharedState] = []  # of the optimizer; there is one at most
        self._contexts = step_contexts(plugin)
        self._loss_scale = LossScale(plugin, links.control)
        self._limit = contextlib.ExitStack()
        self._is_early = False  # whether the plan has to wait for the first training batch
        self._early_call: EarlyCall | None = None  # of train_dataloader
        self._is_accumulating = False  # whether gradients of more batches are to come before the optimizer steps
        self._clippers: list[Clipper] = []
        self._waits_told: set[str] = set()
        self._correction: Correction | None = None
        self._hooks = GradientHooks(self.weights, device=device)
        self._are_gradients_read = False
        self._are_gradients_read_at_once = False  # after every batch, also where gradients are accumulated further
        setup = RankSetup(module, config, links, self.weights, self._contexts, device)
        self._pipeline = Pipeline(setup, later=self._later, stopwatch=stopwatch, moved=self._follow_weights)
        self._watch: ParameterWatch | None = None  # once ranks have shared values
        self._planned: Plan | None = None
        self._averages = Averages(module.trainer, self.weights, connected=connected, settle=self.settle)
        self._metrics = MetricsAlone()
        self._left: LeftByHooks | None = None  # where ranks load nothing, and hooks move batches
        self._shared: tuple[Any, Structure] | None = None
        self._ahead = AheadBatches(module, feed, self._receive_ahead)
        feed.catch_up = self._ahead.catch_up
        feed.state_before = self._ahead.state_of
        self._at_hand: AheadBatch | None = None  # where it was looked at before its turn
        self._first_steps: FirstSteps | None = None
        self._watched: StepWatch | None = None
        self._log: PipeLog | None = None  # of rank 0, in a fit
        self._example, self._is_summarised = module.example_input_array, False
        self._traces = traces_made()
        self._metrics.begin()

    @property
    def plan(self) -> Plan | None:
        """Return the plan, once it is made."""
        return self._planned

    @property
    def comparison(self) -> Comparison | None:
        """Return how the first steps by the plan went beside their prediction; on rank 0, once it is known."""
        return None if self._first_steps is None else self._first_steps.comparison

    @property
    def row(self) -> Mapping[str, float]:
        """Return what loggers were last given, on rank 0."""
        return {} if self._log is None else self._log.row

    @property
    def foreseen(self) -> tuple[Foreseen, ...]:
        """Return the memory that the plan foresees, by rank; () before there is one."""
        return self._pipeline.foreseen

    def use_optimizers(self, optimizers: list[Optimizer], *, are_movable: bool) -> None:
        """Train with these optimizers, over parameters of the whole module.

        Args:
            optimizers: there is one at most.
            are_movable: whether their state can move between ranks, so that the plan may change.
        """
        self._optimizers = optimizers
        self._loss_scale.install()
        for optimizer in optimizers:
            self._pipeline.runner.rounds.predicted = PredictedWeights(
                optimizer, module=self._module, weights=self.weights, batches_left=batches_left
            )
        self._shared_states = [SharedState(optimizer, self.weights, self._links) for optimizer in optimizers]
        private.call_before_step(self._plugin, self._begin_step)
        if _records(self._config, ranks=self._links.control.ranks):
            self._first_steps = FirstSteps(
                self._config,
                pipeline=self._pipeline,
                module=self._module,
                control=self._links.control,
                device=self._device,
                optimizers=optimizers,
                may_change=self._later is None and are_movable and _plans_again(self._config),
            )
        if self._config.watch_every:
            self._watch_steps(optimizers)
        if not are_movable and _plans_again(self._config):
            rank_zero_info(
                f"{type(optimizers[0]).__name__} keeps more of a parameter than optimizer.state[parameter] has, which "
                "cannot move to another rank: the first plan stays."
            )
        self._correct(optimizers)
        self.groups = [Groups(optimizer, self.weights, is_movable=are_movable) for optimizer in optimizers]
        for groups in self.groups:
            clipper = Clipper(groups, weights=self.weights, links=self._links, device=self._device, later=self._later)
            clipper.install(self._plugin)
            self._clippers.append(clipper)

    def _watch_steps(self, optimizers: Sequence[Optimizer]) -> None:
        """Have rows for loggers from now on."""
        control, trainer = self._links.control, self._module.trainer
        if control.rank == 0:
            self._log = PipeLog(self._module, batch_dim=self._config.batch_dim, device=self._device)
        self._watched = StepWatch(
            self._config.watch_every,
            control=control,
            device=self._device,
            optimizers=optimizers,
            ranks_per_host=trainer.num_devices,
            log=self._log,
        )

    def _begin_step(self) -> None:
        """Look whether gradients may be rubbish, since a rank has failed; drop what other ranks step."""
        self._links.watch.raise_failure()
        for shared in self._shared_states:
            shared.drop()
        if self._correction is not None:
            self._correction.begin()

    def end_step(self) -> None:
        """End what `_begin_step` has begun, whether the optimizer has stepped or not."""
        if self._correction is not None:
            self._correction.end()

    def _correct(self, optimizers: Sequence[Optimizer]) -> None:
        """Correct late gradients as the policy of weight versions says.

        Raises:
            UnsupportedError: if that is not known of the optimizer.
        """
        policy, options = self._config.weight_policy, self._config.version_options
        for optimizer in optimizers if policy is not None and policy.is_corrected else ():
            assert policy is not None, "asked above"
            if len(inner_optimizers(optimizer)) > 1:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} has optimizers inside, of which nobody knows who steps what, and "
                    f"versions={self._config.versions!r} corrects their steps. Set versions='2bw', or 'sync'."
                )
            anneal = options.anneal if policy.rate else 0
            if policy.correction == "discrepancy" and not anneal:
                rank_zero_info(
                    f"versions={self._config.versions!r} leaves the learning rates of stages as they are. "
                    "versions_options={'anneal': steps} lowers those of late gradients in the first steps."
                )
            self._correction = Correction(optimizer, policy.correction, anneal=anneal, decay=options.decay)
            self._pipeline.runner.rounds.correction = self._correction

    @property
    def correction(self) -> Correction | None:
        """Return what is done about late gradients; None where nothing is."""
        return self._correction

    @property
    def delays(self) -> tuple[int, ...] | None:
        """Return by stage how many updates late gradients are; None before there is a plan."""
        rounds, plan = self._pipeline.runner.rounds, self._planned
        if plan is None:
            return None
        stages, every = len(plan.layout.stages), self._module.trainer.accumulate_grad_batches
        if rounds.policy is None or rounds.is_flushed:
            return (0,) * stages
        return delays_of(rounds.policy, stages, plan.microbatches * every)

    def delay_of(self, name: str) -> int | None:
        """Return how many updates late the gradients of a parameter are, by its first name; None before a plan."""
        delays, plan = self.delays, self._planned
        if delays is None or plan is None:
            return None
        ranks = {*self.weights.placement.holders.get(name, ())}
        return max((delays[s] for s, own in enumerate(plan.layout.stages) if ranks.intersection(own)), default=0)

    def share(self) -> None:
        """Give every rank the weights of rank 0, and their averages."""
        self.weights.share()
        self._averages.begin()
        self._watch = ParameterWatch(self._module)

    def expect_readers(self, hooks: Sequence[str]) -> None:
        """Prepare gradients for these hooks of the user, and for those that other ranks have; on all ranks together."""
        at_once = any(hook.endswith(_AFTER_BACKWARD) for hook in hooks)
        ranks = self._links.control.sum(torch.tensor([bool(hooks), at_once]).int(), what="whether hooks read gradients")
        self._are_gradients_read, self._are_gradients_read_at_once = map(bool, ranks.tolist())

    def grad_norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients of all ranks; on all ranks together."""
        if not self._clippers:
            raise UnsupportedError("There are no gradients outside of fit, so there is no norm of them.")
        return self._clippers[0].norms(norm_type).total(norm_type)

    def put_gradients_aside(self) -> None:
        """Prepare that gradients are zeroed; keep those of an optimizer step that may be wrong."""
        self.weights.hide_gradients()
        if self._later is not None:
            self._later.put_gradients_aside()

    @property
    def steps_taken_back(self) -> int:
        """Return how many optimizer steps were taken back."""
        return 0 if self._later is None else self._later.taken_back

    def settle(self) -> None:
        """Have weights that stay, before anybody else reads them; on all ranks together."""
        if self._later is not None:
            self._later.settle()

    def empty(self, why: str = "") -> None:
        """Have weights that stay and nothing in flight, as a fit has that goes on from here; on all ranks together.

        Args:
            why: the reason, if it is one that may come after every batch.
        """
        self._pipeline.runner.rounds.give_up(why)
        self.settle()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let hooks have the weights inside: if they write some, forwards in flight run again."""
        self.settle()
        held = {name: parameter for name, parameter in self.weights.parameters.items() if self.weights.holds(name)}
        with self._pipeline.runner.rounds.weights_watched(held):
            yield

    def look_ahead(self, trainer: pl.Trainer) -> None:
        """Plan for the first training batch, if there is one.

        Raises:
            CaptureError, PlanError, BatchError: on every rank, if there can be no pipeline.
        """

        def waits(error: Exception) -> bool:
            if isinstance(error, PipeError) or not self._all_come_to("the loaders of the fit"):
                return False
            self._wait_for_hooks("train_dataloader", error)
            return True

        self._early_call = call = EarlyCall(trainer)
        feed, control = self._feed, self._links.control
        with early_loaders(trainer, feed, control, device=self._device, call=call, waits=waits) as loaders:
            if loaders is not None and trainer.fit_loop.max_batches:
                self._plan_for_first(loaders)

    def begin_loaders(self, asked: AskedEarly) -> None:
        """Open the loaders of the fit, or let it ask for others if what they were made of has changed; on all ranks."""
        call = self._early_call
        assert call is not None, "loaders were asked for before"

        def changes() -> tuple[str, ...]:
            return (*asked.changed(), *call.changed())

        changed = self._links.control.agreed(changes, source=0, what="whether loaders are asked for again")
        if changed:
            forget_loaders(self._module.trainer, self._feed, changed=changed)
        else:
            call.redo()
        private.forget_loader_states(self._module.trainer)
        self._feed.begin_early()

    def _plan_for_first(self, loaders: CombinedLoader) -> None:
        """Plan for the first batch of the loaders."""
        trainer, control = self._module.trainer, self._links.control
        tensors: list[torch.Tensor] = []

        hooks = LeftByHooks(self._module, control, self._feed, device=self._device) if self._has_batch_hooks() else None

        def look() -> tuple[Structure | None, tuple[KeptState, ...]]:
            nonlocal tensors
            if hooks is not None:
                hooks.begin()
            with isolate_rng(), contextlib.suppress(StopIteration):
                batch = self._plugin.convert_input(peek(loaders))
                tensors, structure = flatten(private.transfer(self._module, batch, self._device))
                return structure, () if hooks is None else hooks.taken()
            return None, ()

        with contextlib.suppress(StopIteration):
            look_where_iterated(trainer, loaders)
        structure, left = control.agreed(look, source=0, what="the structure of the first batch")
        if hooks is not None:
            hooks.put_back()
        if structure is not None and structure.leaves:
            shown = contextlib.nullcontext() if hooks is None else hooks.shown(left)
            takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
            arguments = (0,) if takes_index else ()
            call = StepRequest(TRAINING, structure, arguments, answers_of(tensors), tuple(tensors) or None)
            try:
                with shown:
                    self._plan(call)
            except Exception as error:
                if not _may_be_early(error, trainer, self._module) or not self._all_come_to(
                    "the preparation of the first step"
                ):
                    raise
                self._wait_for_hooks("training_step", error)

    def _wait_for_hooks(self, method: str, error: Exception) -> None:
        """Plan when the first batch has come, as something needs what hooks set before that."""
        self._is_early = True
        rank_zero_info(
            f"{method} raises an error before training, so it is planned when the first batch has come, after the "
            f"hooks that run before it. ({type(error).__name__}: {error})"
        )

    def _all_come_to(self, words: str) -> bool:
        """Return whether every rank comes here: an error that one rank alone has is the user's, not one of timing."""
        return not self._links.watch.meet(words, patience_s=self._config.deadline_s / 2)

    def receive(self, batch: Any, transfer: Callable[[Any], Any]) -> Any:
        """Return the batch on the device; on ranks that do not load, stand-ins of the same structure."""
        self._at_hand = batch if isinstance(batch, AheadBatch) else None
        if self._at_hand is not None:
            if self._left is not None:
                self._left.put_in_place(self._at_hand.left)
            self._shared = self._at_hand.content, self._at_hand.structure
            return self._at_hand.content
        batch = self._received(batch, transfer)
        if self._left is not None:
            self._left.heed(self._left.last)
        return batch

    def _receive_ahead(self, batch: Any, earlier: Sequence[LeftForTurn]) -> AheadBatch:
        """Return a batch that follows, on the device."""
        shared = self._shared
        with contextlib.nullcontext([LeftForTurn()]) if self._left is None else self._left.put_by(earlier) as left:
            batch = self._plugin.convert_input(batch)
            self._received(batch, lambda loaded: private.transfer(self._module, loaded, self._device))
        assert self._shared is not None, "received just now"
        received, self._shared = self._shared, shared
        return AheadBatch(*received, left[0], loads=self._feed.loads)

    def _following(self, number: int, weight: float, arguments: tuple[int, ...]) -> tuple[FollowingBatch, ...]:
        """Return the batches behind the one at hand whose forwards may run ahead; on all ranks together."""
        if not self._pipeline.lookahead or self._warms_up or (self._left is not None and not self._left.is_observed):
            self._ahead.catch_up()
            return ()
        count = min(self._pipeline.lookahead, batches_left(self._module.trainer))
        following, left = [], list[KeptState]()
        batches = self._ahead.look(count, goes_further=self._goes_further)
        if self._left is not None and self._left.why_not_ahead:
            return ()
        for k, batch in enumerate(batches, start=1):
            left += batch.left.told
            call = StepRequest(
                TRAINING,
                batch.structure,
                tuple(x + k for x in arguments),
                tensors=batch.tensors,
                holder=self._feed.source,
                steps_ahead=steps_before(self._module.trainer, k),
            )
            leaves = (None,) * len(batch.structure.leaves) if batch.tensors is None else batch.tensors
            at_turn = contextlib.nullcontext if self._left is None else partial(self._left.shown, tuple(left))
            following.append(FollowingBatch(call, leaves, number + k, weight, at_turn))
        return tuple(following)

    def _goes_further(self, batches: Sequence[AheadBatch]) -> bool:
        """Return whether ranks that load fetch one batch behind these already; on all ranks alike."""
        trainer = self._module.trainer
        if self._left is not None:
            for batch in batches:
                self._left.heed(batch.left)
            if self._left.why_not_ahead:
                return False
        if not batches_left(trainer) > len(batches) > 0:
            return False
        is_known = private.fetched_early(trainer) is not None
        why = self._feed.why_not_behind if is_known else "the loader has no length, or is one of several"
        if why and why not in self._waits_told:
            self._waits_told.add(why)
            rank_zero_info(
                f"Ranks wait between two rounds until a batch is loaded, since {why}. A step may take longer than the "
                f"plan says with versions={self._config.versions!r}; its numbers stay the same."
            )
        return not why

    @property
    def _warms_up(self) -> bool:
        """Return whether the user wants the pipeline to be flushed in this epoch."""
        return self._module.trainer.current_epoch < self._config.version_options.warmup_epochs

    def _why_not_ahead(self) -> str:
        """Return why no batches are looked at before their turn, "" if they may be; on all ranks together."""
        if not self._pipeline.lookahead:
            return ""
        if self._left is not None and self._left.why_not_ahead:
            return self._left.why_not_ahead
        policy = self._pipeline.runner.rounds.policy
        if policy is not None and policy.counts_updates and self._module.trainer.accumulate_grad_batches > 1:
            return "gradients are accumulated over batches, and every batch would count as an update"
        return "" if private.can_peek(self._module.trainer) else "the loop fetches batches in its own way"

    def _received(self, batch: Any, transfer: Callable[[Any], Any]) -> Any:
        loaded = batch
        if self._feed.loads:
            batch = transfer(batch)
            if self._config.weight_policy is not None and self._module.trainer.training:
                batch = copied(batch)
        batch, structure = self._feed.share(batch, loaded=loaded)
        self._shared = (batch, structure)
        if self._left is not None:
            self._left.tell()
        return batch

    def step(
        self, method: str, batch: Any, arguments: tuple[int, ...], *, number: int, weight: float, synchronise: bool
    ) -> Any:
        """Run a step of the module on a batch, and return what it returned, the same on all ranks."""
        if self._is_early and method != TRAINING:
            return self._plainly(method, batch, arguments)
        self._is_early = False
        tensors, structure = self._flat(batch)
        assert self._watch is not None, "values were shared"
        self._watch.refuse_others()
        if self._planned is None:
            self._plan(StepRequest(method, structure, arguments, answers_of(tensors), tuple(tensors)))
        assert self._planned is not None, "planned above"
        if method == TRAINING:
            self._refuse_other_optimizers()
        present = tuple(tensors) if self._feed.loads else None
        call = StepRequest(method, structure, arguments, tensors=present, holder=self._feed.source)
        recording = self._recording_of(call) if method == TRAINING else None
        weight = weight * self._loss_scale.factor if method == TRAINING else weight
        has_run = method == TRAINING and self._at_hand is not None and self._feed.loads
        why_not_ahead, following = "", tuple[FollowingBatch, ...]()
        if method == TRAINING and not (why_not_ahead := self._why_not_ahead()):
            following = self._following(number, weight, arguments)
            why_not_ahead = self._why_not_ahead()  # which a batch that follows may have told
        turn = RunOptions(
            (None,) * len(tensors) if present is None else present,
            number=number,
            weight=weight,
            synchronise=synchronise,
            following=following,
            continues=self._at_hand is not None,
            why_not_ahead=why_not_ahead,
            warms_up=method == TRAINING and self._warms_up,
            has_changed=self._at_hand.has_changed(tensors) if has_run and self._at_hand is not None else None,
            record=recording is not None,
            measure_memory=recording is not None and recording.measures_memory,
            leave_sums=method == TRAINING and recording is None and self._may_step_in_parts(),
            stop=lambda: private.is_asked_to_end(self._module.trainer),
            confirm=self._feed.confirm,
        )
        if method == TRAINING:
            self._is_accumulating = not synchronise
        return self._run(call, turn, recording)

    def _recording_of(self, call: StepRequest) -> Recording | None:
        """Return what a training batch is recorded in, if it is; before that, look back at what was recorded."""
        if self._log is not None:
            self._log.begin_batch()
        first = self._first_steps
        if first is not None and first.are_over and not self._is_accumulating:
            self._look_back(first, call)
        if first is not None and first.recording is not None:
            return first.recording
        if self._watched is None:
            return None
        return self._watched.recording(self._module.trainer.global_step, is_new=not self._is_accumulating)

    def _run(self, call: StepRequest, turn: RunOptions, recording: Recording | None) -> Any:
        """Run a step by the plan; log what it says, and return what it returns."""
        if call.method == TRAINING:
            ran, returned = self._trained(call, turn)
            self._stop = ran.stop
            if recording is not None:
                recording.add(ran)
            if self._log is not None:
                self._log.note_batch(ran.samples, call.structure)
            return returned
        said = self._pipeline.evaluate(call, turn)
        self._stop = said.stop if isinstance(said, StepResult) else None
        return self._replayed(said, call)

    def _replayed(self, said: StepSaid, call: StepRequest) -> Any:
        """Log what a step says, keep its state, and return what it returns."""
        return replay(said.record, said.values, samples=said.samples, module=self._module, situation=call.situation)

    def _may_step_in_parts(self) -> bool:
        """Return whether parameters may step beside sums of the gradients of others."""
        assert self._planned is not None, "a step runs by a plan"
        waits = self._are_gradients_read or self._hooks.is_needed or self._later is not None
        waits = waits or self._correction is not None
        return not (waits or self._planned.shard_optimizer) and all(
            can_step_in_parts(self._module, self._plugin, optimizer) for optimizer in self._optimizers
        )

    def step_rest(self, optimizer: Optimizer) -> None:
        """Step the parameters whose sums the last batch has left under way, as these end."""
        parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._pipeline.runner.land(lambda: optimizer.step(), among=parameters)

    def _refuse_other_optimizers(self) -> None:
        """Raise if a hook has given the trainer other optimizers: checkpoints have those of the fit."""
        if any(one is not two for one, two in itertools.zip_longest(self._module.trainer.optimizers, self._optimizers)):
            raise UnsupportedError(
                "A hook has set `trainer.optimizers`; checkpoints, and ranks that share optimizer state, have those "
                "that `configure_optimizers` returned. Change their `param_groups`, or return the optimizer from there."
            )

    def _look_back(self, first: FirstSteps, call: StepRequest) -> None:
        """Say how the first steps by the plan went; where they show a better one, go on by that."""
        self._tell(first)
        if not first.may_change_plan or self._keeps_gradients():
            return
        trainer, passed = self._module.trainer, self._stopwatch.seconds
        steps = steps_left(trainer.estimated_stepping_batches, trainer.global_step)
        change_s = sum(passed.get(phase, 0.0) for phase in ("plan", "stages", "placing"))
        stepped = self.weights.steppers()
        with self._hooks.taken_off():
            is_changed = first.change_plan(call, loading=self._feed.loading, steps=steps, change_s=change_s)
        if is_changed:
            self._links.transport.trim()  # the programs of this plan open what they use
            for groups in self.groups:
                groups.bring(stepped, control=self._links.control)
            self._follow_plan(call)

    def _tell(self, first: FirstSteps) -> None:
        """Say how the first steps went, and log it."""
        recorded = first.tell()
        if recorded is not None and self._log is not None:
            program = recorded.program
            rates = self._log.take_rates(recorded.graph, sum(program.sizes[: program.batch]))
            memory = [peak.total_bytes for peak in recorded.memory]
            step = self._module.trainer.global_step - 1
            self._log.log_steps(recorded.comparable, memory=memory, rates=rates, step=step)

    def _follow_weights(self, stepped: Mapping[str, tuple[int, ...]]) -> None:
        """Have the optimizer state of parameters that this rank holds too from now on; on all ranks together."""
        for groups in self.groups:
            groups.bring(stepped, control=self._links.control)
        self._have_in_place()

    def _keeps_gradients(self) -> bool:
        """Return whether any rank has gradients of batches before this one, which a hook has not zeroed."""
        here = (p.grad for name, p in self.weights.parameters.items() if self.weights.holds(name))
        mine = any(gradient is not None and bool(gradient.any()) for gradient in here)
        found = self._links.control.sum(torch.tensor([float(mine)]), what="whether gradients are kept")
        return bool(found)

    def take_stop(self) -> bool | None:
        """Return, once, whether the results of the last batch said that a rank is asked to stop; None without one."""
        said, self._stop = self._stop, None
        return said

    def _trained(self, call: StepRequest, turn: RunOptions) -> tuple[StepResult, Any]:
        """Run a training step, and then hooks on gradients, which see its state; show stand-ins for other gradients."""
        at_once = self._are_gradients_read_at_once or self._hooks.is_needed
        if at_once and not turn.synchronise:
            turn = replace(turn, synchronise=True)
        state = self._pipeline.runner
        summed = state.reduced
        with self._hooks.around_batch(seed=state.seed, number=turn.number, summed=summed):
            ran = self._pipeline.run(call, turn)
            returned = self._replayed(ran, call)
        if ran.is_skipped:
            state.land(lambda: None, among=())
        if ran.is_skipped and turn.synchronise and not summed:  # the batches of the window before it count
            sum_gradients(self.weights)
        if self._are_gradients_read and self._clippers and turn.synchronise and self._links.control.ranks > 1:
            clipper = self._clippers[0]
            self.weights.show_gradients(dict(zip(clipper.parameters(), clipper.norms().of_each(), strict=True)))
        else:
            self.weights.show_gradients()
        return ran, returned

    def _plainly(self, method: str, batch: Any, arguments: tuple[int, ...]) -> Any:
        """Run a step on this rank alone, which has the whole module and the whole batch until there is a plan."""
        with self.weights.everywhere(), private.located(self._module, self._device), self._contexts[method]():
            self.weights.move(self._device)
            return getattr(self._module, method)(batch, *arguments)

    def end(self, *, healthy: bool) -> None:
        """Give the trainer and the module back what they had.

        Args:
            healthy: whether all ranks come here; only then the whole trained module can be put together.
        """
        if healthy and self._first_steps is not None:
            self._tell(self._first_steps)
        if self._watched is not None:
            self._watched.end(self._module.trainer.global_step, healthy=healthy)
        if healthy:
            self.empty()
            ranks = whole_ranks(self._config, self.weights, self._links.control)
            self.weights.restore(ranks)
            self._averages.restore(ranks)
        else:
            self.weights.leave()
            self._averages.leave()
        for groups in self.groups:
            groups.follow()
        self.show_example()
        self._metrics.end()
        self._limit.close()
        self._pipeline.close()
        Clipper.remove(self._plugin)
        self._loss_scale.remove()
        private.forget_before_step(self._plugin)
        if self._correction is not None:
            self._correction.remove()
        for shared in self._shared_states:
            shared.end()
        private.call_hook_before_transfer(self._module)
        forget_traces(self._traces)

    def show_example(self) -> None:
        """Let the module have its example again, when no summary will run the module on it any more."""
        if not self._is_summarised and self._module.example_input_array is None:  # which a hook may have set since
            self._module.example_input_array = self._example
        self._is_summarised = True

    def _flat(self, batch: Any) -> tuple[list[torch.Tensor], Structure]:
        """Return the tensors of a batch and its structure as all ranks know it, with what hooks have written to it.

        Raises:
            BatchError: if hooks have changed shapes or types of its tensors.
        """
        if self._shared is None or self._shared[0] is not batch:
            self._shared = (batch, self._feed.share(batch)[1])
        (tensors, now), known = flatten(batch), self._shared[1]
        if now.leaves != known.leaves:
            raise BatchError(
                "The tensors of the batch have other shapes or types in the step than after the transfer to the "
                "device. Change batches in on_before_batch_transfer or on_after_batch_transfer."
            )
        if known.form is None:
            return tensors, known if same_besides_tensors(now.template, known.template) else now
        return tensors, known if now.form == known.form else now

    def _plan(self, call: StepRequest) -> None:
        with self._hooks.taken_off():
            self._pipeline.plan_for(call, optimizers=self._optimizers)
        plan = self._follow_plan(call)
        self._watch = ParameterWatch(self._module)
        self._hold()
        for groups in self.groups:
            groups.move(self._device)
        is_converted = type(self._plugin).convert_input is not Precision.convert_input  # to other types than loaded
        self._feed.structures.is_plain = self._links.control.ranks > 1 and not (is_converted or self._has_batch_hooks())
        self._feed.assign(plan.layout.stages[0])
        if self._has_batch_hooks() and len(plan.layout.stages[0]) < self._links.control.ranks:
            self._left = LeftByHooks(self._module, self._links.control, self._feed, device=self._device)
        if not self._feed.loads:
            private.skip_hook_before_transfer(self._module, Awaited)
        elif self._pipeline.lookahead and self._left is None:
            private.skip_hook_before_transfer(self._module, AheadBatch)
        elif self._left is not None:
            private.note_before_transfer(self._module, self._left.begin, AheadBatch)
        if self._links.control.ranks > 1 and not self._is_summarised:  # by the whole module, which no rank has
            self._module.example_input_array = None
        if plan.microbatches > 1:
            warn_of_backward_hooks(self._module)
        is_kept = self._config.keeps_freed_memory and self._device.type == "cpu"
        self._limit.enter_context(freed_memory_kept(wanted=is_kept))
        self._stopwatch.lap("placing")

    def _follow_plan(self, call: StepRequest) -> Plan:
        """Have everything where the plan wants it, once parameters are placed; on all ranks together."""
        assert self._pipeline.planned is not None, "planned just now"
        plan, graph = self._pipeline.planned
        self._planned = plan
        if self._correction is not None and (policy := self._config.weight_policy) is not None:
            own = (s for s, ranks in enumerate(plan.layout.stages) if self._links.control.rank in ranks)
            self._correction.delay = policy.mean_delay(plan.layout, plan.microbatches, next(own, -1))
        self._have_in_place()
        for groups in self.groups:
            groups.follow()
        proposal = self._pipeline.proposal
        if proposal is not None:  # on rank 0
            introduce(proposal, replace(graph, samples=self._pipeline.samples(call.structure)))
            if self._log is not None:
                self._log.log_plan(proposal)
        return plan

    def _have_in_place(self) -> None:
        """Have weights, their averages and shared optimizer state where ranks hold other parameters than before."""
        self.weights.move(self._device)
        self._averages.place(self._device)
        for shared in self._shared_states:
            shared.connect()

    def _has_batch_hooks(self) -> bool:
        """Return whether hooks of the user move batches to the device, which may change them and the module."""
        datamodule = getattr(self._module.trainer, "datamodule", None)  # undeclared
        owners: tuple[tuple[Any, type], ...] = (
            (self._module, pl.LightningModule),
            (datamodule, pl.LightningDataModule),
        )
        return any(
            is_overridden(hook, owner, kind) for owner, kind in owners if owner is not None for hook in TRANSFER_HOOKS
        )

    def _hold(self) -> None:
        """Let CUDA's allocator hold this rank to the limit that the user has set."""
        if self._config.memory_limit is not None and self._device.type == "cuda":
            limit = self.foreseen[self._links.control.rank].memory_bytes
            self._limit.enter_context(held_to(self._device, limit))


def _may_be_early(error: Exception, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether a step may fail because hooks that prepare it have not run."""
    if isinstance(error, PipeError) and not isinstance(error, StepError):
        return False
    callbacks = [c for c in callbacks_of(trainer) if not type(c).__module__.startswith("lightning.pytorch.")]
    return any(
        is_overridden(hook, owner, kind)
        for kind, owners in ((pl.LightningModule, [module]), (pl.Callback, callbacks))
        for owner in owners
        for hook in _PREPARING
    )


_PREPARING = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


def _is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether something else follows than the next training batch: the end of the epoch, or of the training."""
    return trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step + 1


def _plans_again(config: DappleConfig) -> bool:
    """Return whether a plan may change for what was measured; not where every run is to do the same to the last bit.

    Nor with weight versions: another plan would give up forwards in flight, and the next batch read other weights.
    """
    may_differ = config.versions == "sync" and not torch.are_deterministic_algorithms_enabled()
    return config.replan and config.plan is None and may_differ


def _records(config: DappleConfig, *, ranks: int) -> bool:
    """Return whether first steps are recorded: where somebody wants to see them, or a prediction can be checked."""
    return config.trace is not None or config.report is not None or (ranks > 1 and config.costs == "measured")
