#!/bin/sh
# The coding agents that one test and one example run, from npm, at the versions that docs/cli-agents.md names; at night the newest
# ones, too, in a folder of their own. Where npm is not, the test skips and says so.
set -eu
agents="@anthropic-ai/claude-code@2.1.332 @openai/codex@0.169.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4 @google/gemini-cli@0.61.0 @mariozechner/pi-coding-agent@0.73.1"
newest="@anthropic-ai/claude-code@latest @openai/codex@latest opencode-ai@latest @qwen-code/qwen-code@latest @google/gemini-cli@latest @mariozechner/pi-coding-agent@latest"
home="$(cd "$(dirname "$0")/.." && pwd)/.venvs"
[ -z "${AGENTCORE_RL_NO_INSTALL:-}" ] || exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "not installed (needs npm): coding agents; the tests that use them will skip"
    exit 0
fi

install_agents() { # folder, packages
    echo "installing coding agents for the tests: $2"
    mkdir -p "$1"
    cd "$1"
    [ -e package.json ] || echo '{"private": true}' >package.json
    # shellcheck disable=SC2086  # a list of packages
    if npm install --no-audit --no-fund --silent $2 >npm.log 2>&1; then
        # Newer npm does not run the steps that put the programs in place.
        for step in "@anthropic-ai/claude-code/install.cjs" "opencode-ai/postinstall.mjs"; do
            if [ -e "node_modules/$step" ]; then (cd "$(dirname "node_modules/$step")" && node "$(basename "$step")" >/dev/null 2>&1) || true; fi
        done
        echo "$2" >installed
    else
        echo "not available here: coding agents; the tests that use them will skip (see $1/npm.log)"
    fi
}

[ "$(cat "$home/npm/installed" 2>/dev/null || true)" = "$agents" ] || install_agents "$home/npm" "$agents"
[ -z "${AGENTCORE_RL_NIGHTLY:-}" ] || install_agents "$home/npm-newest" "$newest"
