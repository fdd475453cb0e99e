{{- /* Prometheus and Grafana of the release's own: what both are made of. Each takes (dict "root" $ "component" "grafana" "settings" values). */ -}}

{{- /* The pod, but for the container's own lines, which follow. */ -}}
{{- define "lockstep.toolPod" -}}
{{- $values := .root.Values -}}
enableServiceLinks: false
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml $values.gateway.podSecurityContext | nindent 2 }}
{{- include "lockstep.placement" .settings }}
{{- end -}}

{{- define "lockstep.toolContainer" -}}
{{- $values := .root.Values -}}
name: {{ .component }}
image: {{ include "lockstep.image" . | quote }}
imagePullPolicy: {{ .settings.image.pullPolicy | default $values.image.pullPolicy }}
securityContext:
  {{- toYaml $values.gateway.securityContext | nindent 2 }}
{{- with .settings.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Also "port": the one that it listens on, called http. "egress": rules beside DNS. */ -}}
{{- define "lockstep.toolNetwork" -}}
apiVersion: v1
kind: Service
{{ include "lockstep.metadata" . }}
spec:
  ports:
    - name: http
      port: {{ .port }}
      targetPort: http
  selector:
    {{- include "lockstep.selector" . | nindent 4 }}
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
    - ports:
        - port: http
      from:
        {{- with .root.Values.networkPolicy.monitoringFrom }}
        {{- toYaml . | nindent 8 }}
        {{- else }}
        - namespaceSelector: {}
        {{- end }}
        {{- if eq .component "prometheus" }}
        - {{- include "lockstep.peer" (dict "root" .root "component" "grafana") | nindent 10 }}
        {{- end }}
  egress:
    {{- include "lockstep.nameResolution" . | nindent 4 }}
    {{- toYaml .egress | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "lockstep.prometheusUrl" -}}
http://{{ include "lockstep.name" (dict "root" . "component" "prometheus") }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:9090
{{- end -}}
