"""What can be set in the chart's values: the one place from which values.yaml, its schema and its table are generated.

Names are camelCase here since they are the chart's keys. `None` stands for "computed by the chart" or "the cluster's default".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
Quantity = Annotated[str | int, Field(description="A Kubernetes quantity.")]
Scalar = str | int | float | bool
Setting = Annotated[Scalar | list[Any] | None, WithJsonSchema({"type": ["string", "integer", "number", "boolean", "array", "null"]})]
Labels = dict[str, Scalar]
Object = dict[str, Any]
Objects = list[Object]
# `helm --set` makes a string of 0.9.
TEXT: JsonDict = {"type": ["number", "string"], "pattern": r"^[0-9]*\.?[0-9]+$"}


class Values(BaseModel):
    """A key that is not listed is refused: it would be a typing error."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Image(Values):
    registry: str | None = None
    """Instead of `image.registry`."""
    repository: str
    """Name of the image, without registry and tag."""
    tag: str | None = None
    """Instead of `image.tag`."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Instead of any tag."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Instead of `image.pullPolicy`."""


class GlobalImage(Values):
    registry: str = ""
    """Registry and path before every image's name, for example `registry.example.com/team`."""
    tag: str = ""
    """Tag of every image; empty: the chart's appVersion."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes pull."""


class Probe(Values):
    periodSeconds: int = Field(default=10, ge=1)
    """Time between two questions."""
    timeoutSeconds: int = Field(default=5, ge=1)
    """How long an answer may take; a busy pod is not a dead one, so never 1."""
    failureThreshold: int = Field(default=3, ge=1)
    """Failures in a row that count."""


class Service(Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Kind of the Service."""
    port: int = Field(default=80, ge=1, le=65535)
    """Its port."""
    nodePort: int | None = Field(default=None, ge=1, le=65535)
    """Fixed port of the nodes."""
    annotations: Labels = {}
    """Annotations of the Service."""


class ServiceAccount(Values):
    create: bool = True
    """Make one."""
    name: str | None = None
    """Its name; default: the component's."""
    annotations: Labels = {}
    """Its annotations."""


class DisruptionBudget(Values):
    enabled: bool = False
    """Make a PodDisruptionBudget."""
    maxUnavailable: int | str | None = 1
    """Pods that may be evicted at a time."""
    minAvailable: int | str | None = None
    """Pods that must stay; instead of maxUnavailable."""


class NetworkPolicy(Values):
    ingress: Objects = []
    """Further ingress rules."""
    egress: Objects = []
    """Further egress rules."""


class Component(Values):
    """The same keys for each component."""

    image: Image
    replicas: int = Field(default=1, ge=0, le=1000)
    """Pods; with LeaderWorkerSet groups."""
    settings: dict[str, Setting] = {}
    """Settings of the program, in its own names: `max_waiting_requests: 4096`; lists as lists. They win over what the chart computes."""
    extraArgs: list[str] = []
    """Further arguments of the program, each as it is."""
    extraEnv: dict[str, Scalar | None] = {}
    """Further environment variables."""
    envFrom: Objects = []
    """Secrets and ConfigMaps whose keys become environment variables."""
    resources: Object = {}
    """Requests and limits. A CPU limit stalls the step loop when it throttles: leave it out."""
    annotations: Labels = {}
    """Annotations of the workload."""
    podAnnotations: Labels = {}
    """Annotations of its pods."""
    podLabels: Labels = {}
    """Labels of its pods."""
    podSecurityContext: Object = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    """Security context of the pods."""
    securityContext: Object = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    """Security context of the containers."""
    startupProbe: Probe = Probe(periodSeconds=5, failureThreshold=24)
    """Until it succeeds once, no other probe is asked."""
    livenessProbe: Probe = Probe(periodSeconds=10, failureThreshold=3)
    """Failing means: restart."""
    readinessProbe: Probe = Probe(periodSeconds=5, timeoutSeconds=2, failureThreshold=2)
    """Failing means: no traffic. It fails earlier than liveness does."""
    preStopSeconds: int = Field(default=0, ge=0, le=600)
    """Sleep before the signal to stop, so that whoever routes here has noticed."""
    drainSeconds: int = Field(default=30, ge=0, le=3600)
    """Time after the signal in which running requests end or move."""
    terminationGracePeriodSeconds: int | None = Field(default=None, ge=0)
    """Default: preStopSeconds + drainSeconds + 15; less is refused."""
    nodeSelector: Labels = {}
    """Labels that a node must have."""
    tolerations: Objects = []
    """Taints that pods tolerate."""
    affinity: Object = {}
    """Affinity of pods."""
    topologySpreadConstraints: Objects = []
    """How pods spread."""
    priorityClassName: str | None = None
    """Priority of pods."""
    runtimeClassName: str | None = None
    """Runtime of pods, where the cluster needs another than its default."""
    extraVolumes: Objects = []
    """Further volumes of the pods."""
    extraVolumeMounts: Objects = []
    """Further mounts of the container."""
    serviceAccount: ServiceAccount = ServiceAccount()
    """Whom the pods are. No token is mounted where none is needed."""
    pdb: DisruptionBudget = DisruptionBudget()
    """How many pods an eviction may take at a time."""
    networkPolicy: NetworkPolicy = NetworkPolicy()
    """Rules beside the built-in ones."""


class HorizontalPodAutoscaler(Values):
    enabled: bool = False
    """Scale by CPU."""
    minReplicas: int = Field(default=2, ge=1)
    """Least pods."""
    maxReplicas: int = Field(default=10, ge=1)
    """Most pods."""
    targetCPUUtilizationPercentage: int = Field(default=70, ge=1, le=100)
    """Share of the requested CPU to aim at; needs `resources.requests.cpu`."""
    behavior: Object = {"scaleDown": {"stabilizationWindowSeconds": 300}}
    """How fast it may move."""


class Ingress(Values):
    enabled: bool = False
    """Make an Ingress."""
    preset: Literal["nginx", "traefik", "none"] = "none"
    """Annotations without which streams and large prompts break at that controller."""
    className: str | None = None
    """IngressClass."""
    host: str = ""
    """Host name; empty: any."""
    path: str = Field(default="/", pattern="^/")
    """Path prefix."""
    tlsSecret: str | None = None
    """Secret with the host's certificate."""
    annotations: Labels = {}
    """Further annotations; they win over the preset."""


class HttpRoute(Values):
    enabled: bool = False
    """Make an HTTPRoute, where the cluster knows the kind."""
    parentRefs: Objects = []
    """Gateways to attach to."""
    hostnames: list[str] = []
    """Host names; empty: any."""


class Gateway(Component):
    image: Image = Image(repository="lockstep-gateway")
    """Its image."""
    preStopSeconds: int = Field(default=5, ge=0, le=600)
    """Sleep before the signal to stop, so that whoever routes here has noticed."""
    resources: Object = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    """Requests and limits. A CPU limit stalls streams when it throttles: leave it out."""
    pdb: DisruptionBudget = DisruptionBudget()
    """How many pods an eviction may take at a time."""
    service: Service = Service()
    """The Service that clients call."""
    autoscaling: HorizontalPodAutoscaler = HorizontalPodAutoscaler()
    """Gateways by CPU."""
    ingress: Ingress = Ingress()
    """From outside the cluster, the classic way."""
    httpRoute: HttpRoute = HttpRoute()
    """From outside the cluster, by Gateway API."""


class Scheduler(Component):
    image: Image = Image(repository="lockstep-scheduler")
    """Its image."""
    replicas: int = Field(default=2, ge=1, le=5)
    """One leads, the others stand by: 3 s after it is gone, the next one goes on with every stream."""
    pdb: DisruptionBudget = DisruptionBudget(enabled=True)
    """How many pods an eviction may take at a time."""
    apiServerPorts: list[int] = [443, 6443]
    """Ports of the cluster's API server, which schedulers ask for workers and for the lease; opened by the network policy."""
    drainSeconds: int = Field(default=10, ge=0, le=3600)
    """Time after the signal in which plans on their way end."""
    resources: Object = {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    """Requests and limits. A CPU limit stalls every stream when it throttles: leave it out."""


class CompileCache(Values):
    enabled: bool = False
    """Keep compiled kernels on a volume of each pod; else they are made anew with each pod. Over nodes it needs LeaderWorkerSet 0.8."""
    size: Quantity = "10Gi"
    storageClassName: str | None = None
    """Class of the volume."""
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]] = ["ReadWriteOnce"]
    """How it is mounted."""


class SharedMemory(Values):
    enabled: bool | None = None
    """Mount memory at /dev/shm; default: when a pod holds more than one rank."""
    sizeLimit: Quantity = "2Gi"


class GroupAutoscaler(Values):
    enabled: bool = False
    """Scale worker groups by what waits and what runs. Without data nothing is scaled."""
    type: Literal["keda", "hpa"] = "keda"
    """keda: a ScaledObject, where the cluster knows the kind; hpa: a HorizontalPodAutoscaler on metrics that an adapter serves."""
    minReplicas: int = Field(default=1, ge=1)
    """Least groups."""
    maxReplicas: int = Field(default=4, ge=1, le=256)
    """Most groups."""
    prometheusAddress: str = ""
    """URL of Prometheus as KEDA reaches it; default with `monitoring.stack`: the one that it deploys."""
    backlogSeconds: float = Field(default=5.0, gt=0, json_schema_extra=TEXT)
    """Seconds of waiting work a group that one more group is added for."""
    runningRequests: int = Field(default=48, ge=1)
    """Running requests a group that one more group is added for."""
    pollingIntervalSeconds: int = Field(default=15, ge=1)
    """How often KEDA looks."""
    cooldownSeconds: int = Field(default=360, ge=0, le=3600)
    """Groups go, one a minute, when fewer were enough for so long."""


class Worker(Component):
    image: Image = Image(repository="")
    """An empty repository is `lockstep-worker`, with mode cpu or simulated `lockstep-worker-cpu`."""
    mode: Literal["gpu", "cpu", "simulated"] = "gpu"
    """gpu; cpu: the same engine, slow, for small models; simulated: keeps the timing of a GPU, computes nothing."""
    gpuResource: str = "nvidia.com/gpu"
    """Name under which nodes offer GPUs; the number is computed from parallelism."""
    resources: Object = {"requests": {"cpu": "1", "memory": "2Gi"}}
    """Requests and limits beside the GPUs, which are computed."""
    securityContext: Object = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,  # the container toolkit's hook writes links into it on some nodes
        "capabilities": {"drop": ["ALL"]},
    }
    """Security context of the containers. Some nodes' GPU hooks write into the root file system."""
    startupProbe: Probe = Probe(periodSeconds=10, failureThreshold=180)
    """The budget for download, load, warm-up and capture: half an hour."""
    livenessProbe: Probe = Probe(periodSeconds=10, failureThreshold=6)
    """Failing means: restart."""
    service: Service = Service(port=7200)
    """Only its annotations matter: the Service is headless, so that each group has a name."""
    updateStrategy: Object = {"type": "RollingUpdate"}
    """Of the StatefulSet. GPUs have no spare one: pods are replaced, never surged."""
    podManagementPolicy: Literal["Parallel", "OrderedReady"] = "Parallel"
    """Groups do not wait for each other."""
    shm: SharedMemory = SharedMemory()
    """Shared memory between the ranks of a pod."""
    compileCache: CompileCache = CompileCache()
    """What outlasts a pod."""
    autoscaling: GroupAutoscaler = GroupAutoscaler()
    """Groups by backlog."""


class Parallelism(Values):
    tp: int = Field(default=1, ge=1, le=64)
    """Ranks of a worker group, one GPU each."""
    nodes: int = Field(default=1, ge=1, le=64)
    """Nodes that share a group's ranks evenly; more than one needs LeaderWorkerSet in the cluster."""


class PersistentVolumeClaim(Values):
    claimName: str = ""
    """An existing claim that holds the model folder."""
    subPath: str = ""
    """Folder within it."""
    accessMode: Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"] = "ReadOnlyMany"
    """How the claim may be mounted: a ReadWriteOnce one serves a single replica."""


class HostPath(Values):
    path: str = Field(default="", pattern=r"^(/.*)?$")
    """Model folder on every node that runs a worker; readable for the pods' user. Pod security levels below "privileged" admit none."""


class HuggingFace(Values):
    repository: str = Field(default="", pattern=r"^([A-Za-z0-9][\w.-]*/[\w.-]+)?$")
    """Repository, for example `Qwen/Qwen3-0.6B`."""
    revision: str = "main"
    """Branch, tag or commit; pin a commit, so that all replicas hold the same weights."""
    token: str = ""
    """Access token; goes into a Secret. Better: existingSecret."""
    existingSecret: str = ""
    """Secret with the token."""
    secretKey: str = "HF_TOKEN"
    """Key of the token in the Secret."""
    endpoint: str = ""
    """Another hub, for example a mirror."""
    size: Quantity = "50Gi"


class ModelSource(Values):
    type: Literal["demo", "pvc", "hostPath", "huggingFace"] = "demo"
    """demo: SmolLM2-135M-Instruct, which the worker images hold."""
    pvc: PersistentVolumeClaim = PersistentVolumeClaim()
    """With type pvc."""
    hostPath: HostPath = HostPath()
    """With type hostPath."""
    huggingFace: HuggingFace = HuggingFace()
    """With type huggingFace: downloaded by an init container into each pod's volume."""


class Model(Values):
    servedNames: list[str] = Field(default=["lockstep"], min_length=1, max_length=32)
    """Names that clients may ask for; the first labels the metrics."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on GPUs, float32 on CPUs."""
    maxModelLen: int | None = Field(default=None, ge=1)
    """Tokens of prompt and completion together; default: what the model allows."""
    source: ModelSource = ModelSource()
    """Where the weights come from."""


class Auth(Values):
    keys: Objects = []
    """Keys as `python -m services.gateway key` adds them to a file: name, sha256, limits; no secret. Better: existingSecret."""
    existingSecret: str = ""
    """Secret whose key `keys.json` is such a file; what changes in it is read without restart."""


class Tls(Values):
    existingSecret: str = ""
    """Secret with tls.crt, tls.key and ca.crt, as cert-manager makes it: services then speak mutual TLS; renewed files are read anew."""


class NetworkPolicies(Values):
    enabled: bool = True
    """Only the hops that exist are allowed."""
    clientsFrom: Objects = []
    """Peers that may call the gateway; empty: everybody."""
    monitoringFrom: Objects = []
    """Peers that may scrape the admin ports; empty: every pod of the cluster."""


class Monitor(Values):
    enabled: bool = False
    """Make PodMonitors, where the cluster knows the kind."""
    interval: str = "15s"
    """Time between two scrapes."""
    labels: Labels = {}
    """Labels by which your Prometheus finds them."""


class PrometheusRule(Values):
    enabled: bool = False
    """Make a PrometheusRule, where the cluster knows the kind; once in a namespace, since its rules see the whole of it."""
    labels: Labels = {}
    """Labels by which your Prometheus finds it."""
    runbookUrl: str = "docs/runbooks.md"
    """Page that alerts point into: where you keep the one of the repository."""


class Objectives(Values):
    ttftSeconds: float = Field(default=2.0, ge=0.001, le=1000, json_schema_extra=TEXT)
    """The first token of an answer comes within this time."""
    ttftShare: float = Field(default=0.95, gt=0, lt=1, json_schema_extra=TEXT)
    """Of this share of answers."""
    itlSeconds: float = Field(default=0.05, ge=0.001, le=1000, json_schema_extra=TEXT)
    """Each further token comes within this time."""
    itlShare: float = Field(default=0.99, gt=0, lt=1, json_schema_extra=TEXT)
    """Of this share of tokens."""
    availability: float = Field(default=0.999, gt=0, lt=1, json_schema_extra=TEXT)
    """Share of requests that are not answered with a fault of ours (5xx)."""


class Dashboards(Values):
    enabled: bool = True
    """Make ConfigMaps of the Grafana dashboards, which a sidecar of Grafana picks up."""
    labels: Labels = {"grafana_dashboard": "1"}
    """Labels by which it finds them."""
    annotations: Labels = {}
    """Annotations, for example of a folder."""


class Tool(Values):
    image: Image
    resources: Object = {}
    """Requests and limits."""
    nodeSelector: Labels = {}
    """Labels that its node must have."""
    tolerations: Objects = []
    """Taints that it tolerates."""


class Prometheus(Tool):
    image: Image = Image(registry="docker.io", repository="prom/prometheus", tag="v3.5.0")
    """Its image."""
    resources: Object = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Requests and limits."""
    retention: str = Field(default="2d", pattern=r"^[0-9]+[hdw]$")
    """How long it remembers; its disk is the pod's, and gone with it."""
    interval: str = Field(default="5s", pattern=r"^[0-9]+s$")
    """Time between two scrapes."""


class Grafana(Tool):
    image: Image = Image(registry="docker.io", repository="grafana/grafana", tag="12.1.0")
    """Its image."""
    resources: Object = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
    """Requests and limits."""
    adminSecret: str = ""
    """Secret whose keys `user` and `password` let an administrator log in; without one everybody may look and nobody log in."""


class MonitoringStack(Values):
    enabled: bool = False
    """Deploy a Prometheus that scrapes this release, and a Grafana with its dashboards, for a cluster that has none."""
    prometheus: Prometheus = Prometheus()
    """What collects."""
    grafana: Grafana = Grafana()
    """What shows: `kubectl port-forward service/RELEASE-lockstep-grafana 3000`."""


class Monitoring(Values):
    scrapeAnnotations: bool = True
    """Annotate pods with prometheus.io/scrape, for Prometheus without an operator."""
    podMonitor: Monitor = Monitor()
    """For the Prometheus operator."""
    prometheusRule: PrometheusRule = PrometheusRule()
    """Recording rules and alerts."""
    slo: Objectives = Objectives()
    """Service level objectives: bounds of the histograms, red lines of the dashboards and what alerts compare with."""
    dashboards: Dashboards = Dashboards()
    """For Grafana."""
    stack: MonitoringStack = MonitoringStack()
    """Prometheus and Grafana of the release's own."""


class InferencePool(Values):
    enabled: bool = False
    """Make an InferencePool of the gateways, where the cluster knows the kind."""
    endpointPicker: str = ""
    """Service of the endpoint picker."""
    endpointPickerPort: int = Field(default=9002, ge=1, le=65535)
    """Its port."""


class Nccl(Values):
    env: dict[str, Scalar] = {}
    """Variables of NCCL beside NCCL_DEBUG=WARN, for example `NCCL_SOCKET_IFNAME: eth0`."""


class Tests(Values):
    moveEnabled: bool = False
    """`helm test` also deletes a worker pod in the middle of a stream and requires an unbroken answer; needs two worker replicas."""
    keySecret: str = ""
    """Secret with an API key for `helm test`, where keys are set; without it only metrics are tried."""
    secretKey: str = "API_KEY"
    """Key of it in the Secret."""


class Chart(Values):
    image: GlobalImage = GlobalImage()
    """What holds for every image."""
    imagePullSecrets: list[Name] = []
    """Secrets for pulling images."""
    nameOverride: str = Field(default="", max_length=63)
    """Instead of the chart's name in names."""
    fullnameOverride: str = Field(default="", max_length=40)
    """Instead of release and chart name in names."""
    commonLabels: Labels = {}
    """Labels of every object."""
    commonAnnotations: Labels = {}
    """Annotations of every object."""
    listenHost: str = "0.0.0.0"
    """Address that programs listen on; `::` where the cluster is IPv6 only."""
    logLevel: Literal["debug", "info", "warning", "error"] = "info"
    """Of every program."""
    clusterDomain: str = Field(default="cluster.local", min_length=1)
    """DNS domain of the cluster."""
    model: Model = Model()
    """What is served."""
    parallelism: Parallelism = Parallelism()
    """How a group spreads."""
    gateway: Gateway = Gateway()
    """HTTP in, text out."""
    scheduler: Scheduler = Scheduler()
    """Decides what every group computes next."""
    worker: Worker = Worker()
    """Holds the weights, computes."""
    nccl: Nccl = Nccl()
    """Between GPUs."""
    auth: Auth = Auth()
    """API keys. Without any the gateway is open to whoever reaches it."""
    tls: Tls = Tls()
    """Between the services."""
    networkPolicy: NetworkPolicies = NetworkPolicies()
    """Who may talk to whom."""
    monitoring: Monitoring = Monitoring()
    """What Prometheus is told."""
    inferencePool: InferencePool = InferencePool()
    """For gateways that speak the inference extension."""
    tests: Tests = Tests()
    """`helm test`."""
    extraObjects: list[Object | str] = []
    """Further objects; templates in them are evaluated."""
    enabled: bool = True
    """For a chart that this one is part of: its condition may be `lockstep.enabled`."""
    shared: Object = Field(default={}, alias="global")
    """Not read; there so that the chart can be part of another one."""
