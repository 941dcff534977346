#!/usr/bin/env bash
# GSM8K with rLLM on verl, as in gsm8k.yaml.
# .env contains AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET.
set -euo pipefail
cd "$(dirname "$0")"
if [ -f .env ]; then set -a; . ./.env; set +a; fi
exec agentcore-rl train --backend rllm --config gsm8k.yaml "$@"
