# The only interface to this repository, for people and for CI. Everything it makes lies in .cache/.
SHELL := /bin/sh
.SUFFIXES:
.DEFAULT_GOAL := help
.PHONY: gpu-check fleet help demo clean test lint docs-check package-check sanity units molecule build bench changelog venv

# Options for ansible-playbook, for example: make demo ARGS="-e llama_fleet_build=b11434"
ARGS ?=

# Sets $$venv: the first needs ansible-core only, the second the tools of the tests too.
PLAY := venv=$$(sh tests/tools/venv.sh requirements.txt) && PATH="$$venv/bin:$$PATH" ansible-playbook -i inventories/loopback
GATES := venv=$$(sh tests/tools/venv.sh requirements-dev.txt) && \
	PYTHONPATH=.collections "$$venv/bin/python" -m ansible_collections.llamafleet.rpc.tests.tools.gates

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: ## from nothing to an answered prompt: two workers and a primary on this machine
	@$(PLAY) playbooks/site.yml $(ARGS)

bench: ## measure the planner, the demo's fleet with llama-bench over its plan, and (as root) fleets of real hosts
	@venv=$$(sh tests/tools/venv.sh requirements-dev.txt) && PATH="$$venv/bin:$$PATH" PYTHONPATH=.collections \
		sh -c 'for bench in plan place; do python -m ansible_collections.llamafleet.rpc.tests.bench.$${bench}_bench; done'
	@$(PLAY) playbooks/bench.yml $(ARGS)
	@$(GATES) build bench

clean: ## end the demo and remove it, and everything that this Makefile made
	@$(PLAY) playbooks/teardown.yml $(ARGS)
	@rm -rf .cache .ansible dist tests/output "$$(sh tests/tools/prefix.sh)"
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Gone: the demo's services, files and ports (listed above), and .cache with environments, builds and test output."

test: ## everything that CI runs
	@$(GATES)

lint: ## yamllint, ansible-lint, ruff, mypy
	@$(GATES) lint

docs-check: ## documentation and changelog
	@$(GATES) docs

package-check: ## build the collection, install it elsewhere, find everything there
	@$(GATES) package

sanity: ## ansible-test sanity
	@$(GATES) sanity

units: ## all unit tests, those against the real llama.cpp included (builds it once)
	@$(GATES) build pytest target-units

molecule: ## the loopback fleet for real: converge, second run, verify, teardown
	@$(GATES) build molecule

fleet: ## real systemd hosts on this machine: mesh, firewall, services, faults (needs root)
	@$(GATES) build fleet

gpu-check: ## the collection against a real NVIDIA card; ARGS as of tests/gpu/check --help
	@tests/gpu/check $(ARGS)

build: ## llama.cpp and the demo model for the tests, in .cache/llama
	@$(GATES) build

changelog: ## cut or refresh the release notes of the version in galaxy.yml
	@venv=$$(sh tests/tools/venv.sh requirements-dev.txt) && PATH="$$venv/bin:$$PATH" ANSIBLE_COLLECTIONS_PATH=.collections \
		antsibull-changelog release --update-existing --reload-plugins

venv: ## print the folder of the tests' virtual environment (made when missing)
	@sh tests/tools/venv.sh requirements-dev.txt
