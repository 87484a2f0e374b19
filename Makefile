# The one door, for people and for CI. What takes more than a line lives in scripts/.

.DEFAULT_GOAL := help
.PHONY: help docs demo cluster test test-quick engines coverage sim chaos fuzz check bench venv deploy-tools vllm-venv lmcache-venv sglang-venv clean

help: ## say what each target does
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		while IFS="$$(printf '\t')" read -r name what; do printf '  make %-13s %s\n' "$$name" "$$what"; done

demo: ## real engines that share one pool behind a router: right answers, times to first token
	@scripts/engine-venv vllm
	@.venv-vllm/bin/python bench/demo.py

cluster: venv ## three daemons, an etcd and a Redis on this machine, until Ctrl-C (TRAFFIC=1: with something to see)
	@TRAFFIC=$(TRAFFIC) .venv/bin/python -m tests.support.cluster_to_look_at

test: deploy-tools vllm-venv lmcache-venv sglang-venv ## every test but the next ones, in all environments (ARGS="..." goes to pytest)
	@scripts/test $(ARGS)

test-quick: venv ## unit and contract tests: for whoever changes a line; minutes
	@scripts/test --quick $(ARGS)

engines: venv vllm-venv lmcache-venv sglang-venv ## many engines: vLLM servers behind a router, every API compared; LMCache; SGLang; fifteen minutes
	@.venv-vllm/bin/python -m pytest -m engines tests/integration/vllm $(ARGS)
	@.venv-lmcache/bin/python -m pytest -m engines tests/integration/lmcache $(ARGS)
	@.venv-sglang/bin/python -m pytest -m engines tests/integration/sglang $(ARGS)

coverage: venv ## how much of the product the unit and contract tests run, with a floor
	@scripts/coverage $(ARGS)

sim: venv ## ten thousand seeds of a simulated cluster with faults
	@.venv/bin/python -m tests.sim.simulation 0 10000

chaos: venv ## ten minutes of faults in a real cluster, whose history is checked (ARGS="--seed 7 --seconds 60")
	@.venv/bin/python -m tests.chaos $(ARGS)

fuzz: venv ## a million inputs for everything that decodes foreign bytes (ARGS="--count 10000000 --target peer")
	@.venv/bin/python -m tests.fuzz $(ARGS)

check: venv ## ruff, mypy, the direction of imports, the ceiling of code lines
	@scripts/check

bench: venv vllm-venv ## the quick form of the main benches, into .bench/
	@scripts/bench

docs: venv ## the documents as a site, into site/: links checked, nothing from the internet
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

venv: ## .venv: kvpool and its development tools
	@scripts/venv

deploy-tools: ## into .venv, what renders the Helm chart and checks it: 350 MB
	@scripts/venv deploy

vllm-venv: ## .venv-vllm: a CPU build of vLLM with kvpool in it
	@scripts/engine-venv vllm tests

lmcache-venv: ## .venv-lmcache: LMCache, with a CPU build of vLLM and kvpool in it
	@scripts/engine-venv lmcache

sglang-venv: ## .venv-sglang: SGLang for a CPU, and TransferQueue, with kvpool in it
	@scripts/engine-venv sglang

clean: ## remove what the other targets made, environments included
	@rm -rf .venv .venv.lock .venv-vllm .venv-vllm.lock .venv-lmcache .venv-lmcache.lock .venv-sglang .venv-sglang.lock .venv-peers .venv-peers.lock .servers .demo .cluster .bench .fuzz site dist .coverage .coverage.*
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find kvpool storage engine_plugins tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
