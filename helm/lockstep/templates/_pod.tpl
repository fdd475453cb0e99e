{{- /* What all pods share.
"lockstep.pod" takes (dict "root" $ "component" "gateway" "settings" .Values.gateway "env" (dict) "mounts" list "volumes" list "initContainers" list
"resources" dict "token" bool). `env` holds the program's settings as the chart computes them; those of the user win. */ -}}

{{- define "lockstep.grace" -}}
{{- $least := add .settings.preStopSeconds .settings.drainSeconds 15 -}}
{{- if kindIs "invalid" .settings.terminationGracePeriodSeconds -}}
{{- $least -}}
{{- else if lt (int64 .settings.terminationGracePeriodSeconds) $least -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d is less than preStopSeconds + drainSeconds + 15 = %d: running requests would be cut off" .component (int64 .settings.terminationGracePeriodSeconds) $least) -}}
{{- else -}}
{{- int64 .settings.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{- /* Gateways and the leading scheduler are ready once a worker is: a roll-out that waits for weights has not failed. */ -}}
{{- define "lockstep.progressDeadline" -}}
{{- $probe := .Values.worker.startupProbe -}}
{{- add (mul $probe.periodSeconds $probe.failureThreshold) 600 -}}
{{- end -}}

{{- /* (dict "root" $ "component" "gateway" "kind" "Deployment" "settings" .Values.gateway). What is scaled keeps the number that it has: one
that is left out where it was given before begins anew at 1. It is left out when the server knows that a scaler has set it since, and would
call it a conflict: after Helm 4, not after Helm 3, which applies nothing. `helm template` sees no number. */ -}}
{{- define "lockstep.replicas" -}}
{{- if not .settings.autoscaling.enabled -}}
replicas: {{ .settings.replicas }}
{{- else -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace (include "lockstep.name" .) -}}
{{- $scaled := false -}}
{{- $applied := false -}}
{{- range .metadata.managedFields -}}
{{- if eq (default "" .subresource) "scale" }}{{ $scaled = true }}{{ end -}}
{{- if and (eq .manager "helm") (eq .operation "Apply") }}{{ $applied = true }}{{ end -}}
{{- end -}}
{{- if not (and $scaled $applied) -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.podMetadata" -}}
{{- $ports := include "lockstep.ports" .component | fromJsonArray -}}
metadata:
  labels: # no version: a new chart alone restarts nobody
    {{- include "lockstep.selector" . | nindent 4 }}
    app.kubernetes.io/part-of: lockstep
    {{- with include "lockstep.union" (list .root.Values.commonLabels .settings.podLabels) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- $annotations := dict "kubectl.kubernetes.io/default-container" .component }}
  {{- if .root.Values.monitoring.scrapeAnnotations }}
  {{- $_ := set $annotations "prometheus.io/scrape" true }}
  {{- $_ := set $annotations "prometheus.io/port" (index $ports 1) }}
  {{- end }}
  annotations:
    {{- include "lockstep.union" (list $annotations .settings.podAnnotations) | trim | nindent 4 }}
{{- end -}}

{{- /* No merge of maps here: it would take false, 0 and "" of the user's for absent. */ -}}
{{- define "lockstep.env" -}}
{{- $prefix := printf "LOCKSTEP_%s_" (upper .component) -}}
{{- $env := dict "HOME" "/tmp" "PYTHONUNBUFFERED" "1" -}}
{{- range $part := list .env .settings.settings }}
{{- range $name, $value := $part }}{{ $_ := set $env (printf "%s%s" $prefix (upper $name)) $value }}{{ end }}
{{- end }}
{{- range $part := list (default (dict) .plainEnv) .settings.extraEnv }}
{{- range $name, $value := $part }}{{ $_ := set $env $name $value }}{{ end }}
{{- end }}
{{- range $name, $value := $env }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $name | quote }}
  value: {{ include "lockstep.string" $value }}
{{- end }}
{{- end }}
{{- range .extraEnv }}
{{- if not (hasKey $env .name) }}
{{ list . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* What every container of a program's pod has from the user, in an init container too. */ -}}
{{- define "lockstep.envFrom" -}}
{{- with .settings.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lockstep.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- include "lockstep.strings" . | trim | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lockstep.probe" -}}
{{ .name }}Probe:
  httpGet:
    path: {{ .path }}
    port: admin
  periodSeconds: {{ .probe.periodSeconds | int }}
  timeoutSeconds: {{ .probe.timeoutSeconds | int }}
  failureThreshold: {{ .probe.failureThreshold | int }}
{{- end -}}

{{- define "lockstep.pod" -}}
{{- $root := .root -}}
{{- $ports := include "lockstep.ports" .component | fromJsonArray -}}
{{- $grace := include "lockstep.grace" . -}}
enableServiceLinks: false
automountServiceAccountToken: {{ .token | default false }}
serviceAccountName: {{ include "lockstep.serviceAccount" . | quote }}
terminationGracePeriodSeconds: {{ $grace }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .settings.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- include "lockstep.placement" .settings }}
{{- with .settings.affinity }}
affinity:
  {{- tpl (toYaml .) $root | nindent 2 }}
{{- end }}
{{- with .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- tpl (toYaml .) $root | nindent 2 }}
{{- end }}
{{- with .initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .component }}
    image: {{ include "lockstep.image" . | quote }}
    imagePullPolicy: {{ .settings.image.pullPolicy | default $root.Values.image.pullPolicy }}
    {{- with .settings.extraArgs }}
    args:
      {{- range . }}
      - {{ . | quote }}
      {{- end }}
    {{- end }}
    ports:
      - name: {{ ternary "http" "grpc" (eq .component "gateway") }}
        containerPort: {{ index $ports 0 }}
      - name: admin
        containerPort: {{ index $ports 1 }}
    env:
      {{- include "lockstep.env" . | trim | nindent 6 }}
    {{- with include "lockstep.envFrom" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .resources | default .settings.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .settings.securityContext }}
    securityContext:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- include "lockstep.probe" (dict "name" "startup" "path" (ternary "/readyz" "/livez" (eq .component "worker")) "probe" .settings.startupProbe) | nindent 4 }}
    {{- include "lockstep.probe" (dict "name" "liveness" "path" "/livez" "probe" .settings.livenessProbe) | nindent 4 }}
    {{- include "lockstep.probe" (dict "name" "readiness" "path" "/readyz" "probe" .settings.readinessProbe) | nindent 4 }}
    {{- if .settings.preStopSeconds }}
    lifecycle:
      preStop:
        exec:
          command: ["python3", "-c", "import time; time.sleep({{ .settings.preStopSeconds }})"]
    {{- end }}
    volumeMounts:
      - name: temporary
        mountPath: /tmp
      {{- with .mounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- with .settings.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: temporary
    emptyDir: {}
  {{- with .volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .settings.extraVolumes }}
  {{- tpl (toYaml .) $root | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* What every component has beside its workload. */ -}}
{{- define "lockstep.companions" -}}
{{- if .settings.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
{{ include "lockstep.metadata" (dict "root" .root "component" .component "name" (include "lockstep.serviceAccount" .) "annotations" .settings.serviceAccount.annotations) }}
automountServiceAccountToken: false
{{- end }}
{{- if .settings.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "lockstep.metadata" . }}
spec:
  {{- if not (kindIs "invalid" .settings.pdb.minAvailable) }}
  minAvailable: {{ .settings.pdb.minAvailable }}
  {{- else if not (kindIs "invalid" .settings.pdb.maxUnavailable) }}
  maxUnavailable: {{ .settings.pdb.maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow # what serves nobody holds up no drain of a node
  selector:
    matchLabels:
      {{- include "lockstep.selector" . | nindent 6 }}
{{- end }}
{{- if and .root.Values.monitoring.podMonitor.enabled (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") }}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
{{ include "lockstep.metadata" (merge (dict "labels" .root.Values.monitoring.podMonitor.labels) .) }}
spec:
  selector:
    matchLabels:
      {{- include "lockstep.selector" . | nindent 6 }}
  podMetricsEndpoints:
    - port: admin
      interval: {{ .root.Values.monitoring.podMonitor.interval | quote }}
      relabelings: # the operator's label of this name, the port's, would take the place of the gateway's own
        - action: labeldrop
          regex: endpoint
{{- end }}
{{- if .root.Values.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{{ include "lockstep.metadata" . }}
spec:
  podSelector:
    matchLabels:
      {{- include "lockstep.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    {{- toYaml .ingress | nindent 4 }}
    - ports:
        - port: admin
      from:
        {{- with .root.Values.networkPolicy.monitoringFrom }}
        {{- toYaml . | nindent 8 }}
        {{- if $.root.Values.monitoring.stack.enabled }}
        - {{- include "lockstep.peer" (dict "root" $.root "component" "prometheus") | nindent 10 }}
        {{- end }}
        {{- else }}
        - namespaceSelector: {}
        {{- end }}
    {{- with .settings.networkPolicy.ingress }}
    {{- tpl (toYaml .) $.root | nindent 4 }}
    {{- end }}
  egress:
    {{- include "lockstep.nameResolution" . | nindent 4 }}
    {{- with .egress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with get (default dict .settings.settings) "trace_endpoint" }}
    - ports:
        - port: {{ include "lockstep.urlPort" . }}
          protocol: TCP
    {{- end }}
    {{- with .settings.networkPolicy.egress }}
    {{- tpl (toYaml .) $.root | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{- /* A rule of egress. Policies see the port of the pod that answers: 5353 on OpenShift. */ -}}
{{- define "lockstep.nameResolution" -}}
- ports:
    {{- range $port := list 53 5353 }}
    {{- range $protocol := list "UDP" "TCP" }}
    - port: {{ $port }}
      protocol: {{ $protocol }}
    {{- end }}
    {{- end }}
{{- end -}}

{{- /* Rules of egress to the API server, as YAML: none where no port is named, since a rule without ports would open all of them. */ -}}
{{- define "lockstep.apiServer" -}}
{{- with .Values.scheduler.apiServerPorts }}
- ports:
    {{- range . }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
{{- end }}
{{- end -}}

{{- /* A peer of a network policy: the pods of a component. */ -}}
{{- define "lockstep.peer" -}}
podSelector:
  matchLabels:
    {{- include "lockstep.selector" . | nindent 4 }}
{{- end -}}
