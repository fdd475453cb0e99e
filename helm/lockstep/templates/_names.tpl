{{- /* Names and labels. Components are told apart by `component`. A release may have dots in its name, a Service may not. */ -}}

{{- define "lockstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "component" "gateway") */ -}}
{{- define "lockstep.name" -}}
{{- printf "%s-%s" (include "lockstep.fullname" .root) .component -}}
{{- end -}}

{{- /* What never changes in the life of a release, since selectors are immutable. */ -}}
{{- define "lockstep.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* The head of an object: (dict "root" $ "component" "gateway" "name" optional "labels" optional "annotations" optional) */ -}}
{{- define "lockstep.metadata" -}}
metadata:
  name: {{ .name | default (include "lockstep.name" .) | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  {{- $labels := include "lockstep.selector" . | fromYaml }}
  {{- $_ := set $labels "app.kubernetes.io/part-of" "lockstep" }}
  {{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion }}
  {{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service }}
  {{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
  labels:
    {{- include "lockstep.union" (list $labels .root.Values.commonLabels .labels) | trim | nindent 4 }}
  {{- with include "lockstep.union" (list .root.Values.commonAnnotations .annotations) | trim }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Maps as one whose values must be strings: of a key that several have, the last one counts. */ -}}
{{- define "lockstep.union" -}}
{{- $all := dict -}}
{{- range . }}{{ range $key, $value := . }}{{ $_ := set $all $key $value }}{{ end }}{{ end -}}
{{- include "lockstep.strings" $all -}}
{{- end -}}

{{- /* A map whose values must be strings, each quoted. Null entries are left out. Starts with a line break. */ -}}
{{- define "lockstep.strings" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key | quote }}: {{ include "lockstep.string" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* A quoted string of a value. Numbers reach templates as float64 and would print as 1e+06. */ -}}
{{- define "lockstep.string" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) (lt . 1e15) (gt . -1e15) -}}
{{- . | int64 | toString | quote -}}
{{- else if or (kindIs "float64" .) (kindIs "slice" .) -}}
{{- . | toJson | quote -}}
{{- else -}}
{{- . | toString | quote -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.image" -}}
{{- $image := .settings.image -}}
{{- $registry := $image.registry | default .root.Values.image.registry -}}
{{- $repository := $image.repository -}}
{{- if and (eq .component "worker") (not $repository) -}}
{{- $repository = ternary "lockstep-worker" "lockstep-worker-cpu" (eq .settings.mode "gpu") -}}
{{- end -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- with $registry }}{{ . | trimSuffix "/" }}/{{ end }}{{ $repository }}
{{- with $image.digest }}@{{ . }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- define "lockstep.serviceAccount" -}}
{{- .settings.serviceAccount.name | default (ternary (include "lockstep.name" .) "default" .settings.serviceAccount.create) -}}
{{- end -}}

{{- /* Port of a URL as a number, given or its scheme's. */ -}}
{{- define "lockstep.urlPort" -}}
{{- $url := urlParse . -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- end -}}

{{- /* Ports are the same in every installation: gRPC or HTTP, then admin. */ -}}
{{- define "lockstep.ports" -}}
{{- index (dict "gateway" (list 8000 9100) "scheduler" (list 7100 9101) "worker" (list 7200 9102)) . | toJson -}}
{{- end -}}
