"""States that vLLM's cache manager hands over, by its own specs: no model, and blocks whose contents are written down.

Also as on accelerators, where kernels of Mamba 2 and of delta attention give the state at the last whole block of a
prompt from within a step (`num_prefill_checkpoint_blocks`), which those for CPUs do not.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.request import Request

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.layout.pages import HostPages
from kvpool.engine_plugins.vllm.layout.shards import Kind
from kvpool.engine_plugins.vllm.naming.namespace import group_rules
from kvpool.engine_plugins.vllm.plan import plan_states, state_name
from kvpool.engine_plugins.vllm.worker.stored import stored_groups
from kvpool.types import PartKind

BLOCK, BLOCKS, STATES = 8, 64, 3
STEPS_LATE = 12
"""So many steps after its own a state is copied. Blocks are so few that unpinned ones would be used again by then."""


def kimi(checkpoints: int) -> KVCacheConfig:
    """The groups of Kimi-Linear: MLA, and three times delta attention."""
    mla = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, page_size_padded=None
    )
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 96), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=1 if checkpoints else None,
    )
    groups = [KVCacheGroupSpec([f"delta {i}"], state) for i in range(STATES)]
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[*groups, KVCacheGroupSpec(["mla"], mla)],
        prefix_cache_retention_interval=0,
    )


class World:
    """A cache manager, what steps write into the blocks of states, and saves that copy them later."""

    def __init__(self, checkpoints: int) -> None:
        self.checkpoints = checkpoints
        config = kimi(checkpoints)
        self.rules = group_rules(config, BLOCK, 1)
        self.manager = KVCacheManager(
            config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.holds: dict[tuple[int, int], tuple[int, ...]] = {}  # group, block: the tokens before
        self.copying: deque[list[tuple[tuple[int, int], tuple[int, ...]]]] = deque()
        self.saved: dict[bytes, tuple[int, ...]] = {}

    def begin(self, name: str, tokens: list[int]) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def end_of_step(self, request: Request, start: int, most: int) -> int:
        """Where vLLM's scheduler ends a step: `Scheduler._mamba_block_aligned_split`."""
        prompt = request.num_prompt_tokens
        end = min(start + most, prompt)
        if end < prompt:
            end = max(end // BLOCK * BLOCK, start + BLOCK)
        last = get_mamba_prefill_checkpoint_position(prompt, BLOCK, False)
        within = end == prompt and self.checkpoint_in(start, end) > 0
        stops = [0 if within else last, request.shared_prefix_boundary]
        return min((stop for stop in stops if start < stop < end), default=end)

    def checkpoint_in(self, start: int, end: int) -> int:
        """The state that kernels give from within a step, or 0."""
        at = get_mamba_prefill_checkpoint_position(end, BLOCK, False)
        valid = is_mamba_prefill_checkpoint_valid(
            query_start=start,
            query_end=end,
            checkpoint_position=at,
            hash_block_size=BLOCK,
            mamba_block_size=BLOCK,
            checkpoint_alignment=1 if self.checkpoints else None,
        )
        return at if valid else 0

    def step(self, request: Request, most: int, hit: tuple[Any, int] | None) -> None:
        """Compute some of a prompt. hit: of the engine's own cache, in the first step."""
        manager, tokens = self.manager, request.prompt_token_ids
        assert tokens is not None
        blocks, found = hit or (None, 0)
        start = request.num_computed_tokens + found
        end = self.end_of_step(request, start, most)
        manager.new_step_starts()
        assert manager.allocate_slots(
            request, end - start, found, blocks, full_sequence_must_fit=False
        )
        handed = manager.take_boundary_state_offloads().get(request.request_id, [])
        tables = manager.get_block_ids(request.request_id)
        within = self.checkpoint_in(start, end) if end == len(tokens) else 0
        for group in range(STATES):
            if start:
                before = self.holds[group, tables[group][(start - 1) // BLOCK]]
                assert before == tuple(tokens[:start]), "the engine computes on another state"
            self.holds[group, tables[group][-(-end // BLOCK) - 1]] = tuple(tokens[:end])
            if within:
                self.holds[group, tables[group][-(-end // BLOCK) - 2]] = tuple(tokens[:within])
        request.num_computed_tokens = end
        self.save(request, handed)

    def save(self, request: Request, handed: list[tuple[int, int, int]]) -> None:
        tokens, pool = request.prompt_token_ids, self.manager.block_pool
        assert tokens is not None
        copies = []
        hashes = request.block_hashes
        for at, saves in plan_states(self.rules, handed, hashes, BLOCK, len(hashes)).items():
            assert len(saves) == STATES, "of one group without the others a state is of no use"
            for save in saves:
                (block,) = save.block_ids
                place = self.rules[save.rule].group, block
                pool.touch([pool.blocks[block]])
                copies.append((place, tuple(tokens[: (at + 1) * BLOCK])))
                self.saved[state_name(save.keys, save.rule)] = self.holds[place]
        self.copying.append(copies)
        if len(self.copying) > STEPS_LATE:
            self.copy()

    def copy(self) -> None:
        for place, tokens in self.copying.popleft():
            assert self.holds[place] == tokens, "another state than its key says"
            self.manager.block_pool.free_blocks([self.manager.block_pool.blocks[place[1]]])


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_handed_over_is_the_state_of_its_key_until_it_is_copied(
    checkpoints: int, seed: int
) -> None:
    draw, world = random.Random(seed), World(checkpoints)
    idle = world.manager.block_pool.get_num_free_blocks()
    beginnings = [[draw.randrange(99) for _ in range(draw.randrange(8, 60))] for _ in range(3)]
    running: list[Request] = []
    prompts: list[list[int]] = []
    while len(prompts) < 30 or running:
        if len(prompts) < 30 and len(running) < 2:
            rest = [draw.randrange(99) for _ in range(draw.randrange(1, 50))]
            prompts.append(draw.choice(beginnings) + rest)
            request = world.begin(str(len(prompts)), prompts[-1])
            blocks, found, request.shared_prefix_boundary = world.manager.get_computed_blocks(
                request
            )
            world.step(request, draw.choice([8, 24, 200]), (blocks, found))
            running.append(request)
        request = draw.choice(running)
        if request.num_computed_tokens < len(request.prompt_token_ids or ()):
            world.step(request, draw.choice([8, 24, 200]), None)
        else:
            world.manager.free(request)
            running.remove(request)
    while world.copying:
        world.copy()
    assert world.manager.block_pool.get_num_free_blocks() == idle
    for tokens in prompts:
        last = (len(tokens) - 1) // BLOCK
        if last:
            key = world.begin("again", tokens).block_hashes[last - 1][-16:]
            for at, rule in enumerate(world.rules):
                if rule.state:
                    assert world.saved[state_name(key, at)] == tuple(tokens[: last * BLOCK])


def test_a_state_is_one_part_of_each_rank_without_the_padding() -> None:
    spec = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=256,
        mamba_cache_mode="align",
    )
    content = 3 * 8 * 2 + 2 * 4 * 4 * 4
    config = KVCacheConfig(5, [], [KVCacheGroupSpec(["one", "two"], spec)])
    backing = torch.arange(2 * 5 * 256).to(torch.int8)
    tensors = {
        name: backing.as_strided((5, 1, 1, content), (256, content, content, 1), at * 5 * 256)
        for at, name in enumerate(["one", "two"])
    }
    parallel = SimpleNamespace(
        rank=1,
        tensor_parallel_size=2,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
    )
    engine = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
    )
    rules = group_rules(config, BLOCK, 1)
    (group,) = stored_groups(
        engine,
        config,
        PluginConfig.from_given({}),
        rules,
        tensors,
        lambda _: "MAMBA2_ATTN",
        lambda _: None,
    )
    assert (group.kind, group.share.cut.parts) == (Kind.RANKS, 2)
    assert group.held().parts == {1: 2 * content}
    (part,) = group.pages(0, lambda rows, step: HostPages([r.numpy() for r in rows]), print).parts
    assert part.part == 1
    table = np.zeros((3, 2 * content), np.uint8)
    slots = SimpleNamespace(table=table, nbytes=2 * content)
    part.pages.to_slots(np.array([4, 2]), slots, np.array([0, 2]), None)
    for row, block in ((0, 4), (2, 2)):
        expected = [tensors[name][block].contiguous().view(torch.uint8) for name in tensors]
        assert table[row].tobytes() == torch.cat([e.flatten() for e in expected]).numpy().tobytes()


def test_the_rules_of_its_groups() -> None:
    *states, attention = group_rules(kimi(1), BLOCK, 1)
    assert [(rule.kind, rule.window_blocks, rule.state) for rule in states] == [
        (PartKind.WINDOW, 1, True)
    ] * STATES
    assert (attention.kind, attention.state) == (PartKind.FULL, False)
