"""The files of deploy/: what they ask of the server is there, and the tools at hand take them."""

import http.client
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import typer
import yaml

from blockdraft.cli.main import app
from blockdraft.server.config import ServeConfig
from tests.serving import PATIENCE, chat_body, running_server, wait_until
from tests.small_llm import load_llm

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(path.name for path in DEPLOY.iterdir())


def test_every_option_that_a_file_uses_exists():
    serve = typer.main.get_command(app).commands["serve"]
    known = {spelling for option in serve.params for spelling in option.opts}
    used = {
        option
        for line in "\n".join((DEPLOY / name).read_text() for name in FILES).splitlines()
        if "pip" not in line and "wheel" not in line and "kubectl" not in line
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }
    of_others = {"--yes", "--no-install-recommends", "--uid", "--create-home", "--mount", "--now",
                 "--start-period", "--interval", "--timeout", "--constraint",
                 "--build-arg", "--gpus"}  # fmt: skip
    assert {"--api-key-file", "--root-path", "--log-format", "--trusted-proxy"} <= used
    assert used - of_others <= known


def test_the_probes_of_kubernetes_need_no_key_and_end_in_time(folders):
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"]
             for name in ("startup", "liveness", "readiness")}  # fmt: skip
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    with running_server(load_llm(folders), api_keys=("key",)) as running:
        for path in paths.values():
            assert running.client.get(path).status_code == 200
        running.traffic.is_draining = True
        assert running.client.get("/ready").status_code == 503
        running.traffic.is_draining = False
    given = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert float(given["--drain-timeout"]) < pod["terminationGracePeriodSeconds"]
    assert given["--threads"] == container["resources"]["requests"]["cpu"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_prometheus_gets_the_metrics_with_the_key_of_its_file(folders):
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    with running_server(load_llm(folders), api_keys=("key",)) as running:
        assert running.client.get(job["metrics_path"]).status_code == 401
        headers = {"authorization": f"{job['authorization']['type']} key"}
        assert running.client.get(job["metrics_path"], headers=headers).status_code == 200
    assert "credentials" not in job["authorization"]  # only its file


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not here")
def test_prometheus_takes_the_configuration():
    command = ["promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path):
    unit = (DEPLOY / "blockdraft.service").read_text()
    here = tmp_path / "blockdraft.service"
    here.write_text(unit.replace("/opt/blockdraft/bin/blockdraft", "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    seconds = {name: float(re.search(rf"{name}[= ](\d+)", unit)[1])
               for name in ("TimeoutStopSec", "--drain-timeout")}  # fmt: skip
    assert seconds["--drain-timeout"] < seconds["TimeoutStopSec"]


def test_a_service_reaches_its_gpu_and_keeps_what_is_compiled_for_it():
    """Without devices CUDA finds none, and without a folder Triton compiles nothing."""
    unit = (DEPLOY / "blockdraft.service").read_text()
    settings = [line for line in unit.splitlines() if not line.startswith("#")]
    assert "PrivateDevices=yes" not in settings
    assert {"DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"} <= set(settings)
    cache = re.search(r"BLOCKDRAFT_CACHE=(\S+)", unit)[1]
    assert f"TRITON_CACHE_DIR={cache}/triton" in unit
    image = (DEPLOY / "Dockerfile").read_text()
    (volume,) = re.findall(r"^VOLUME (\S+)$", image, re.MULTILINE)
    assert f"TRITON_CACHE_DIR={volume}/triton" in image


def nginx_config(folder: Path, port: int, upstream: int) -> Path:
    """The file as it is, on other ports and inside what nginx needs beside it."""
    site = (DEPLOY / "nginx.conf").read_text()
    site = site.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
    site = site.replace("listen 80;", f"listen 127.0.0.1:{port};")
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path = folder / "nginx.conf"
    # Its workers, which would be nobody, must write to this folder.
    user = "user root;\n" if os.geteuid() == 0 else ""
    path.write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{site}\n}}\n"
    )
    return path


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not here")
def test_behind_nginx_streams_flow_and_a_client_that_leaves_ends_its_request(
    folders, tmp_path, unused_port
):
    config = {
        "root_path": "/llm",
        "allowed_hosts": ("models.example.org",),
        "trusted_proxies": ("127.0.0.1",),
    }
    with running_server(load_llm(folders), **config) as running:
        conf = nginx_config(tmp_path, unused_port, httpx.URL(running.url).port)
        with subprocess.Popen(["nginx", "-p", tmp_path, "-c", conf]) as nginx:
            try:
                check_through_proxy(unused_port, running)
            finally:
                nginx.terminate()


def check_through_proxy(port, running):
    headers = {"host": "models.example.org"}
    url = f"http://127.0.0.1:{port}/llm"
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
        wait_until(lambda: _answers(client))
        assert "<title>" in client.get("/").text
        assert client.get("/page/page.js").status_code == 200
        foreign = client.get("/v1/models", headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403
        large = "x" * (ServeConfig().max_body + 1000)
        assert client.post("/v1/chat/completions", json=chat_body(large)).status_code == 413
        body = chat_body(stream=True, max_tokens=400)
        arrivals = []
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for _ in response.iter_lines():
                arrivals.append(time.monotonic())
                if len(arrivals) == 6:
                    # While it streams: nothing was held back until the end.
                    assert running.traffic.num_active == 1
                    break
        wait_until(lambda: running.traffic.num_active == 0)  # the client has left


def _answers(client):
    try:
        return client.get("/health").status_code == 200
    except (httpx.HTTPError, http.client.HTTPException):
        return False


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_image_gets_all_that_a_wheel_is_built_from():
    """What is not copied into it, or is ignored, could not be installed there."""
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "src"}
    assert {f"!{name}" for name in names} <= set(ignored)
    health = re.search(r"CMD (\[.*urlopen.*\])", (DEPLOY / "Dockerfile").read_text())
    compile(json.loads(health[1])[2], "health", "exec")
