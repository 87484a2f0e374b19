"""Operators' changes: namespaces and jobs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec

from kvpool.admin.cluster_view import Answers, Cluster, View
from kvpool.admin.handlers.inventory import Looking
from kvpool.admin.paging import listed
from kvpool.admin.problems import Refused, not_found
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import (
    check_namespace,
    check_tenant,
    chosen_nodes,
    having,
    tenant_of,
    whole_only,
)
from kvpool.admin.types import (
    ClearInfo,
    ClearRequest,
    JobInfo,
    JobRequest,
    Listed,
    NamespaceInfo,
    OfJob,
    OfNamespace,
    OfTenant,
    SettingsPatch,
    TenantPage,
)
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobState, JobView, Progress, ScrubJob, job_name, parse_job, verb_of

CHANGE_S = 5.0  # for what goes to the membership
JOB_BITS = 32


class Changing:
    """Handlers."""

    def __init__(self, cluster: Cluster, looking: Looking) -> None:
        self._cluster = cluster
        self._looking = looking

    # ---- namespaces --------------------------------------------------------------------------------

    @route("POST", "/v1/namespaces/{digest}/clear", "admin", body_optional=True)
    async def clear_namespace(
        self, call: Call, wanted: OfNamespace, body: ClearRequest
    ) -> ClearInfo:
        """Start a new epoch of a namespace: all its blocks become misses."""
        tenant = tenant_of(call.who, wanted.tenant)
        if body.dry_run:
            found = await self._looking.namespace(tenant, wanted.digest)
            return ClearInfo(wanted.digest, tenant, found.epoch + 1, dry_run=True)
        message = operator_wire.Clear(bytes.fromhex(wanted.digest), body.fence)
        return ClearInfo(wanted.digest, tenant, await self._change(call, tenant, message))

    @route("PATCH", "/v1/namespaces/{digest}", "admin")
    async def configure_namespace(
        self, call: Call, wanted: OfNamespace, body: SettingsPatch
    ) -> NamespaceInfo:
        """Change settings of a namespace, in the whole cluster."""
        tenant = tenant_of(call.who, wanted.tenant)
        given = {
            name: value for name, value in msgspec.to_builtins(body).items() if value is not None
        }
        if not given:
            raise Refused(400, "invalid", "name at least one setting to change")
        quotas = given.keys() & {"dram_quota", "ssd_quota"}
        given |= {name: _quota(given[name]) for name in quotas}
        await self._change(
            call, tenant, operator_wire.Configure(bytes.fromhex(wanted.digest), **given)
        )
        return await self._looking.namespace(tenant, wanted.digest)

    async def _change(
        self, call: Call, tenant: str, message: operator_wire.Clear | operator_wire.Configure
    ) -> Any:
        """Change a namespace at a node that has it open, preferably at the local one. Raises `Refused`."""
        digest = message.digest.hex()

        def find(view: View, answers: Answers[NodeStats]) -> str:
            check_namespace(view, answers, tenant, digest)
            nodes = having(answers, tenant, digest) or having(answers, tenant)
            if not nodes:
                raise Refused(503, "unavailable", f"no node that answered has tenant {tenant!r}")
            return view.node if view.node in nodes else nodes[0]

        node = await self._cluster.consult(find, now=True)
        answer = await self._cluster.daemon.get(
            message, node=node, tenant=tenant, by=call.by, wait_s=CHANGE_S
        )
        await self._cluster.follow(node, tenant, digest)
        self._cluster.changed()
        return answer

    # ---- jobs --------------------------------------------------------------------------------------

    @route("GET", "/v1/jobs", "viewer")
    async def list_jobs(self, call: Call, wanted: TenantPage) -> Listed[JobInfo]:
        """Jobs that nodes remember."""
        tenant = tenant_of(call.who, wanted.tenant) if wanted.tenant else ""
        found, unreachable = await self._jobs(tenant.__eq__ if tenant else call.who.sees, [])
        return listed(found, lambda each: each.job, wanted, unreachable)

    @route("POST", "/v1/jobs", "operator", status=202)
    async def begin_job(self, call: Call, wanted: OfTenant, body: JobRequest) -> JobInfo:
        """Start a job: evict, warm, move or scrub blocks, on nodes."""
        tenant = tenant_of(call.who, wanted.tenant)
        if isinstance(body.spec, ScrubJob):
            whole_only(call.who)
        raw = msgspec.json.encode(body.spec)
        parse_job(raw)  # whether its parts go together
        digest, source = getattr(body.spec, "namespace", ""), getattr(body.spec, "source", "")

        def find(view: View, answers: Answers[NodeStats]) -> list[str]:
            if digest:
                check_namespace(view, answers, tenant, digest)
            else:
                check_tenant(answers, tenant)
            nodes = chosen_nodes(view, body.nodes)
            known = {*having(answers, tenant, digest), *answers.unreachable}
            return nodes if body.nodes else [n for n in nodes if n in known and n != source]

        nodes = await self._cluster.consult(find, now=True)
        job = job_name(verb_of(body.spec), secrets.randbits(JOB_BITS))
        begun = await self._cluster.get_each(
            nodes, operator_wire.BeginJob(job, raw, body.dry_run), tenant=tenant, by=call.by
        )
        if not begun.nodes:
            why = "; ".join(f"{node}: {text}" for node, text in sorted(begun.unreachable.items()))
            raise Refused(409, "conflict", f"no node has started the job. {why}".rstrip())
        (merged,) = merge_jobs(begun.nodes.values())
        return msgspec.structs.replace(merged, unreachable=begun.unreachable)

    @route("GET", "/v1/jobs/{job}", "viewer")
    async def get_job(self, call: Call, wanted: OfJob) -> JobInfo:
        """A job's progress, on all its nodes."""
        return await self._job(call, wanted.job)

    @route("DELETE", "/v1/jobs/{job}", "operator")
    async def stop_job(self, call: Call, wanted: OfJob) -> JobInfo:
        """Stop a job, on all its nodes. Work already done is kept."""
        job = await self._job(call, wanted.job)
        if any(view.kind == "scrub" for view in job.nodes):
            whole_only(call.who)
        stopped = await self._cluster.get_each(
            [view.node for view in job.nodes], operator_wire.StopJob(job.job), by=call.by
        )
        after = await self._job(call, wanted.job)
        return msgspec.structs.replace(
            after, unreachable={**after.unreachable, **stopped.unreachable}
        )

    async def _job(self, call: Call, name: str) -> JobInfo:
        """Raises `Refused`."""
        jobs, unreachable = await self._jobs(call.who.sees, [name])
        if not jobs:
            raise not_found(f"there is no job {name!r}, or it has expired")
        return msgspec.structs.replace(jobs[0], unreachable=unreachable)

    async def _jobs(
        self, seen: Callable[[str], bool], names: list[str]
    ) -> tuple[list[JobInfo], dict[str, str]]:
        """The jobs of these names, or all, whose tenants are seen; and the nodes that did not answer."""
        view = await self._cluster.view()
        answers = await self._cluster.get_each(view.names(), operator_wire.Jobs(names))
        views = chain.from_iterable(answers.nodes.values())
        return merge_jobs(each for each in views if seen(each.tenant)), answers.unreachable


def merge_jobs(views: Iterable[JobView]) -> list[JobInfo]:
    """One entry for all nodes of a job. A node's view may be of another job of that name: of another tenant's."""
    jobs: dict[str, list[JobView]] = {}
    for view in views:
        jobs.setdefault(view.job, []).append(view)
    return [_merged(sorted(each, key=lambda view: view.node)) for each in jobs.values()]


def _merged(views: list[JobView]) -> JobInfo:
    first = views[0]
    states = {view.state for view in views}
    order = (JobState.RUNNING, JobState.FAILED, JobState.CANCELLED, JobState.DONE)
    return JobInfo(
        job=first.job,
        kind=first.kind,
        state=next(state for state in order if state in states),
        dry_run=first.dry_run,
        tenant=first.tenant,
        by=first.by,
        nodes=views,
        **{name: sum(getattr(view, name) for view in views) for name in Progress.__struct_fields__},
    )


def _quota(value: float) -> int | float:
    """Bytes are whole numbers above 1, a share is up to 1; the daemon refuses others."""
    return int(value) if value == 0 or (value > 1 and value.is_integer()) else value
