"""The table of all routes: names, parameters, answers, and required roles. `openapi.py` describes it."""

from __future__ import annotations

from kvpool.admin import types as t
from kvpool.admin.handlers.blocks import Blocks
from kvpool.admin.handlers.changes import Changing
from kvpool.admin.handlers.inventory import Looking
from kvpool.admin.handlers.monitoring import EVENT_STREAM, Watching
from kvpool.admin.handlers.operator import Forwarding, OperatorRequest, is_change
from kvpool.admin.handlers.pages import OfFile, Pages
from kvpool.admin.handlers.receipts import Accounting
from kvpool.admin.handlers.routers import Routers
from kvpool.admin.handlers.sessions import Sessions
from kvpool.admin.routing import Route
from kvpool.telemetry.metrics import CONTENT_TYPE
from kvpool.telemetry.receipts_export import MEDIA
from kvpool.wire.operator_json import OperatorAnswer


def routes(
    looking: Looking,
    blocks: Blocks,
    sessions: Sessions,
    accounting: Accounting,
    changing: Changing,
    routers: Routers,
    watching: Watching,
    forwarding: Forwarding,
    pages: Pages,
) -> list[Route]:
    """Answered by these. The order is that of the description."""
    return [
        *_gateway(looking, watching, pages),
        *_nodes(looking, changing),
        *_namespaces(looking, changing),
        *_blocks(blocks),
        *_sessions(sessions),
        *_receipts(accounting),
        *_jobs(changing),
        *_routers(routers),
        *_config(changing),
        *_watching(watching),
        *_forwarding(forwarding),
    ]


def _gateway(looking: Looking, watching: Watching, pages: Pages) -> list[Route]:
    html = "text/html"
    return [
        Route("GET", "/healthz", looking.get_health, None, t.Status),
        Route("GET", "/readyz", looking.get_readiness, None, t.Status),
        Route("GET", "/openapi.json", pages.get_openapi, "viewer", dict),
        Route(
            *("GET", "/metrics", watching.get_metrics, "viewer", None),
            whole=True,
            media=CONTENT_TYPE,
        ),
        Route("GET", "/v1/me", looking.get_me, "viewer", t.Me),
        Route("GET", "/", pages.redirect_root, None, None, media=html, hidden=True),
        Route("GET", "/ui", pages.redirect_ui, None, None, media=html, hidden=True),
        Route("GET", "/ui/{path:.*}", pages.get_ui, None, None, OfFile, media=html, hidden=True),
    ]


def _nodes(looking: Looking, changing: Changing) -> list[Route]:
    one, drain = "/v1/nodes/{node}", "/v1/nodes/{node}/drain"
    return [
        Route("GET", "/v1/cluster", looking.get_cluster, "viewer", t.ClusterInfo),
        Route("GET", "/v1/nodes", looking.list_nodes, "viewer", t.NodeList, t.Page),
        Route("GET", one, looking.get_node, "viewer", t.NodeDetail, t.OfNode),
        Route("GET", f"{one}/segments", looking.list_segments, "viewer", t.SegmentList, t.OfNode),
        Route("PUT", drain, changing.drain_node, "operator", t.DrainInfo, t.OfNode, whole=True),
        Route(
            "DELETE", drain, changing.undrain_node, "operator", t.DrainInfo, t.OfNode, whole=True
        ),
    ]


def _namespaces(looking: Looking, changing: Changing) -> list[Route]:
    one = "/v1/namespaces/{digest}"
    return [
        Route(
            "GET",
            "/v1/namespaces",
            looking.list_namespaces,
            "viewer",
            t.NamespaceList,
            t.TenantPage,
        ),
        Route("GET", one, looking.get_namespace, "viewer", t.NamespaceInfo, t.OfNamespace),
        Route(
            *("PATCH", one, changing.configure_namespace, "admin"),
            *(t.NamespaceInfo, t.OfNamespace, t.SettingsPatch),
        ),
        Route(
            *("POST", f"{one}/clear", changing.clear_namespace, "admin"),
            *(t.ClearInfo, t.OfNamespace, t.ClearRequest),
            body_optional=True,
        ),
        Route("GET", "/v1/tenants", looking.list_tenants, "viewer", t.TenantList, t.TenantPage),
        Route("GET", "/v1/memory", looking.get_memory, "viewer", t.MemoryInfo, t.OfTenant),
    ]


def _blocks(blocks: Blocks) -> list[Route]:
    return [
        Route(
            *("GET", "/v1/namespaces/{digest}/blocks", blocks.list_blocks, "viewer"),
            *(t.BlockList, t.BlockPage),
        ),
        Route("GET", "/v1/blocks/{key}", blocks.get_block, "viewer", t.BlockDetail, t.OfBlock),
        Route(
            *("POST", "/v1/lookup", blocks.lookup, "viewer"),
            *(t.LookupInfo, t.OfTenant, t.LookupRequest),
            routers=True,
        ),
        Route(
            *("POST", "/v1/why", blocks.why, "viewer"),
            *(t.WhyInfo, t.OfTenant, t.WhyRequest),
        ),
        Route("POST", "/v1/pins", blocks.pin, "operator", t.PinInfo, t.OfTenant, t.PinRequest),
    ]


def _sessions(sessions: Sessions) -> list[Route]:
    one = "/v1/sessions/{session}"
    return [
        Route(
            "GET", "/v1/sessions", sessions.list_sessions, "viewer", t.SessionList, t.SessionPage
        ),
        Route("GET", one, sessions.get_session, "viewer", t.SessionDetail, t.OfSession),
        Route("DELETE", one, sessions.end_session, "operator", t.SessionEnded, t.OfSession),
        Route(
            *("POST", "/v1/intents", sessions.intend, "operator"),
            *(t.IntentInfo, t.OfTenant, t.IntentRequest),
            routers=True,
        ),
    ]


def _receipts(accounting: Accounting) -> list[Route]:
    return [
        Route(
            *("GET", "/v1/receipts", accounting.list_accounts, "viewer"),
            *(t.AccountList, t.AccountPage),
            texts=tuple(MEDIA.values()),
        ),
        Route(
            *("GET", "/v1/receipts/requests", accounting.list_receipts, "viewer"),
            *(t.ReceiptList, t.ReceiptPage),
            texts=tuple(MEDIA.values()),
        ),
    ]


def _jobs(changing: Changing) -> list[Route]:
    one = "/v1/jobs/{job}"
    return [
        Route("GET", "/v1/jobs", changing.list_jobs, "viewer", t.JobList, t.TenantPage),
        Route(
            *("POST", "/v1/jobs", changing.begin_job, "operator"),
            *(t.JobInfo, t.OfTenant, t.JobRequest),
            status=202,
        ),
        Route("GET", one, changing.get_job, "viewer", t.JobInfo, t.OfJob),
        Route("DELETE", one, changing.stop_job, "operator", t.JobInfo, t.OfJob),
    ]


def _routers(routers: Routers) -> list[Route]:
    drain = "/v1/engines/{name}/drain"
    return [
        Route("GET", "/v1/engines", routers.list_engines, "viewer", t.EngineList, t.TenantPage),
        Route(
            *("PUT", drain, routers.drain_engine, "operator", t.EngineDrain, t.OfEngine),
            whole=True,
            routers=True,
        ),
        Route(
            *("DELETE", drain, routers.undrain_engine, "operator", t.EngineDrain, t.OfEngine),
            whole=True,
            routers=True,
        ),
        Route(
            *("PUT", "/v1/engines/{name}/weight", routers.weigh_engine, "operator"),
            *(t.EngineWeight, t.OfEngine, t.WeightRequest),
            whole=True,
            routers=True,
        ),
        Route(
            *("GET", "/v1/requests/{id}", routers.get_request, "viewer", t.Explained, t.OfRequest),
            routers=True,
        ),
        Route(
            *("POST", "/v1/explain", routers.explain, "viewer", t.Explained),
            body=t.ExplainRequest,
            whole=True,
            routers=True,
        ),
    ]


def _config(changing: Changing) -> list[Route]:
    return [
        Route(
            *("GET", "/v1/config", changing.get_config, "viewer", t.SettingList, t.OnNode),
            whole=True,
        ),
        Route(
            *("PATCH", "/v1/config", changing.change_config, "admin", t.SettingsChanged),
            body=t.ConfigPatch,
            whole=True,
        ),
    ]


def _watching(watching: Watching) -> list[Route]:
    return [
        Route(
            *("GET", "/v1/events", watching.stream_events, "viewer", None, t.EventsWanted),
            media=EVENT_STREAM,
        ),
        Route("GET", "/v1/audit", watching.list_audit, "admin", t.AuditList, t.Page),
        Route(
            *("GET", "/v1/history", watching.get_history, "viewer", t.History, t.HistoryWanted),
            whole=True,
        ),
        Route("GET", "/v1/hot", watching.get_hot, "viewer", t.HotList, t.HotWanted),
    ]


def _forwarding(forwarding: Forwarding) -> list[Route]:
    """The role is the least one: `operator_rules.py` has that of each request."""
    return [
        Route(
            *("POST", "/v1/operator", forwarding.forward_request, "viewer"),
            *(OperatorAnswer, t.OfTenant, OperatorRequest),
            is_change=is_change,
        ),
    ]
