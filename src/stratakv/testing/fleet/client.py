"""What clients and operators do to rank 0 in a run, and whether they get what they were promised.

Owns the script's execution and the check of every answer. Must not look inside the engine.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from stratakv.cache.records import CacheUse
from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.attachment import AttachmentState, StorageCall, Verb
from stratakv.engine.ranks.peer_calls import PeerCall
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.ranks.step_messages import AbortRequest, Command, Flush, Stop, Submit
from stratakv.engine.request import FinishReason, Output, Prompt
from stratakv.testing.fleet.runner import expected_tokens
from stratakv.testing.fleet.scenario import Plan
from stratakv.testing.fleet.stores import namespaces

MOST_STEPS: Final = 4000


@dataclass(slots=True)
class RunTotals:
    """What a run came to, in tokens but for ``steps``; ``cached`` by tier."""

    steps: int = 0
    output_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))


class EngineClient:
    """Of one engine. ``reuse``: whether any of a request's tokens may have been cached."""

    def __init__(self, plan: Plan, engine: RankedEngine, *, reuse: bool) -> None:
        self.trace = RunTotals()
        self.plan = plan
        self.engine = engine
        self.prompts: dict[RequestId, Prompt] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, FinishReason] = {}
        self.aborted: set[RequestId] = set()
        self._reuse = reuse
        self._adapters = namespaces(plan.spec)
        self._detaching = False

    def do(self, command: Command) -> None:
        attached = self.engine.storage_stats() is not None
        match command:
            case Submit(prompt):
                self._submit(prompt)
            case AbortRequest(request):
                self.aborted.add(request)
                self.engine.abort(request)
            case Flush():
                self.engine.flush()
            case StorageCall(Verb.DETACH):
                self._detach(force=command.force)
            case StorageCall():
                self._detaching = self._detaching and command.verb is not Verb.RESUME
                if attached:
                    self.engine.call_storage(command)
            case PeerCall() | Stop():
                raise AssertionError(f"no script has {command}")

    def _submit(self, prompt: Prompt) -> None:
        try:
            self.engine.submit(prompt)
        except RequestError:  # it could never fit these pools
            return
        self.prompts[prompt.id] = prompt
        self.outputs[prompt.id] = []
        self.aborted.discard(prompt.id)  # an abort that came before it was nobody's

    def go_on(self) -> None:
        """After a step: ask until the store is free, as an operator does."""
        if self._detaching:
            self._detach(force=False)

    def _detach(self, *, force: bool) -> None:
        self._detaching = False
        if self.engine.storage_stats() is None:
            return
        reports = self.engine.call_storage(StorageCall(Verb.DETACH, force=force))
        self._detaching = reports[0].state is AttachmentState.DRAINING

    def on_output(self, output: Output) -> None:
        prompt, output_ids = self.prompts[output.request], self.outputs[output.request]
        assert output.request not in self.ended, f"{output.request}: an output after the end"
        if output.token is not None:
            self.trace.output_tokens += 1
            output_ids.append(output.token)
            right = expected_tokens(
                prompt.tokens, len(output_ids), self._adapters.place(prompt.adapter)
            )
            assert output_ids == right, f"{output.request} has {output_ids}, not {right}"
        if output.cached is not None:
            reads = self._reuse and CacheUse.READ in prompt.use
            assert reads or not output.cached.total, "something was reused after all"
            for tier in ("device", "host", "storage"):
                self.trace.cached[tier] += {
                    "device": output.cached.device,
                    "host": output.cached.host,
                    "storage": output.cached.storage,
                }[tier]
        if output.finish is not None:
            self.ended[output.request] = output.finish
            whole = len(output_ids) == prompt.sampling.max_tokens
            self.verify_end(output, whole=whole)

    def verify_end(self, output: Output, *, whole: bool) -> None:
        """AssertionError where a request may not end so. ``whole``: it has all it asked for."""
        aborted, count = output.finish is FinishReason.ABORT, len(self.outputs[output.request])
        assert whole or (aborted and output.request in self.aborted), (
            f"{output.request} ended as {output.finish} after {count} tokens"
        )


class FleetClient(EngineClient):
    """Of a fleet that serves alone."""

    def __init__(self, plan: Plan, engine: RankedEngine) -> None:
        super().__init__(plan, engine, reuse=plan.reuse)

    def run(self) -> None:
        """The whole script, and then the end of the fleet."""
        for event in self.plan.events:
            while event.settled and len(self.ended) < len(self.prompts):
                self._step()
            for _ in range(event.after):
                self._step()
            self.do(event.command)
        while self.engine.has_work():
            self._step()
        assert self.ended.keys() == self.prompts.keys(), "requests were lost"
        self.engine.close()

    def _step(self) -> None:
        self.trace.steps += 1
        assert self.trace.steps < MOST_STEPS, f"no end after {MOST_STEPS} steps"
        for output in self.engine.step():
            self.on_output(output)
        self.go_on()
