#!/bin/sh
# The coding agents that one test runs, from npm, at the versions that docs/cli-agents.md names. `newest` as the first argument
# takes the newest ones. Where npm is not, the test skips and says so.
set -eu
agents="@anthropic-ai/claude-code@2.1.332 @openai/codex@0.169.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4"
[ "${1:-}" != newest ] || agents="@anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code"
home="$(cd "$(dirname "$0")/.." && pwd)/.venvs/npm"
[ -z "${AGENTCORE_RL_NO_INSTALL:-}" ] || exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "not installed (needs npm): coding agents; the tests that use them will skip"
    exit 0
fi
[ "$(cat "$home/installed" 2>/dev/null || true)" != "$agents" ] || exit 0
echo "installing coding agents for the tests: $agents"
mkdir -p "$home"
cd "$home"
[ -e package.json ] || echo '{"private": true}' >package.json
# shellcheck disable=SC2086  # a list of packages
if npm install --no-audit --no-fund --silent $agents >npm.log 2>&1; then
    # Newer npm does not run the steps that put the programs in place.
    for step in "@anthropic-ai/claude-code/install.cjs" "opencode-ai/postinstall.mjs"; do
        if [ -e "node_modules/$step" ]; then (cd "$(dirname "node_modules/$step")" && node "$(basename "$step")" >/dev/null 2>&1) || true; fi
    done
    echo "$agents" >installed
else
    echo "not available here: coding agents; the tests that use them will skip (see $home/npm.log)"
fi
