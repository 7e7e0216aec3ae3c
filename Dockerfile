# One image for the worker, the dashboard and `tallybook migrate`. Put your application in place of deploy/app.py.
#
# Checked: hadolint. The install, the health checks, migrate, worker and dashboard ran as user 1000 on a read-only root,
# outside of a container. Not run: a build of this file and a container of it, since there was no Docker where it was written.
FROM python:3.13-slim AS build
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY src src
# Once 0.1.0 is on the index, 'tallybook[binary,crypto,email,templates,web,webhooks]==0.1.*' stands here, without these files.
RUN /opt/venv/bin/pip install --no-cache-dir '.[binary,crypto,email,templates,web,webhooks]'

FROM python:3.13-slim
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /srv/app
COPY deploy/app.py ./
USER 1000:1000
# 9464: metrics and probes of the worker; 8420: the dashboard.
EXPOSE 9464 8420
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
# A list: a shell as the first process would not pass SIGTERM on.
CMD ["tallybook", "worker", "-A", "app:app", "--log-format", "json", "--metrics-port", "9464"]
