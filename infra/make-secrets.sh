#!/usr/bin/env bash
# Fills infra/secrets/ with random passwords, keys and tokens for compose.yaml. What is there already stays.
set -euo pipefail
umask 077
folder=${1:-"$(dirname "$0")/secrets"}
mkdir -p "$folder"
cd "$folder"
if [[ -e ray_token ]]; then
    echo "$folder is filled already; remove it to make new secrets"
    exit 0
fi

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
password=$(random) login=team:$(random) key=$(random) secret=$(random)

# Compose mounts secrets with the file's own owner and mode, and containers run as other users.
publish() { cat > "$1"; chmod 644 "$1"; }
printf '%s' "$password" | publish postgres_password
cat > prefect-server.env <<END
PREFECT_SERVER_DATABASE_CONNECTION_URL=postgresql+asyncpg://prefect:$password@postgres:5432/prefect
PREFECT_SERVER_API_AUTH_STRING=$login
END
echo "PREFECT_API_AUTH_STRING=$login" > prefect-client.env
cat > store.env <<END
AWS_ENDPOINT_URL=http://s3:8333
AWS_DEFAULT_REGION=us-east-1
AWS_ACCESS_KEY_ID=$key
AWS_SECRET_ACCESS_KEY=$secret
END
publish s3_users.json <<END
{"identities": [{"name": "team", "credentials": [{"accessKey": "$key", "secretKey": "$secret"}], "actions": ["Admin"]}]}
END
# Last: its presence says that all is there.
random | publish ray_token
echo "made $folder"
