{{- /* Names of the Secrets in use; empty where there is none. */ -}}

{{- define "lockstep.hubSecret" -}}
{{- with .Values.model.source.huggingFace -}}
{{- if .existingSecret }}{{ .existingSecret }}{{ else if .token }}{{ include "lockstep.fullname" $ }}-hub{{ end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.keysSecret" -}}
{{- with .Values.auth -}}
{{- if .existingSecret }}{{ .existingSecret }}{{ else if .keys }}{{ include "lockstep.fullname" $ }}-keys{{ end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.tlsMount" -}}
{{- if .Values.tls.existingSecret }}
name: tls
mountPath: /etc/lockstep/tls
readOnly: true
{{- end -}}
{{- end -}}

{{- define "lockstep.tlsVolume" -}}
name: tls
secret:
  secretName: {{ .Values.tls.existingSecret | quote }}
{{- end -}}
