{{- /* The workers' pods, the same under a StatefulSet and under a LeaderWorkerSet. */ -}}

{{- define "lockstep.ranksPerPod" -}}
{{- div .Values.parallelism.tp .Values.parallelism.nodes -}}
{{- end -}}

{{- define "lockstep.modelPath" -}}
{{- $source := .Values.model.source -}}
{{- if eq $source.type "demo" -}}/opt/lockstep/models/SmolLM2-135M-Instruct
{{- else if eq $source.type "huggingFace" -}}/models/{{ base (default "" $source.huggingFace.repository) }}
{{- else -}}/models/model
{{- end -}}
{{- end -}}

{{- /* The worker's pod as an argument of "lockstep.pod", as YAML. */ -}}
{{- define "lockstep.workerPod" -}}
{{- $worker := .Values.worker -}}
{{- $source := .Values.model.source -}}
{{- $ranks := include "lockstep.ranksPerPod" . | int -}}
{{- $env := dict "host" .Values.listenHost "log_format" "json" "log_level" .Values.logLevel -}}
{{- $_ := set $env "model" (include "lockstep.modelPath" .) -}}
{{- $_ := set $env "tensor_parallel_size" .Values.parallelism.tp -}}
{{- $_ := set $env "drain_s" $worker.drainSeconds -}}
{{- $_ := set $env "dtype" .Values.model.dtype -}}
{{- $_ := set $env "max_model_len" .Values.model.maxModelLen -}}
{{- if eq $worker.mode "simulated" }}{{ $_ := set $env "engine" "simulated" }}{{ end -}}
{{- $plain := dict "XDG_CACHE_HOME" "/cache" "HF_HOME" "/cache/huggingface" "TRITON_CACHE_DIR" "/cache/triton" "TORCHINDUCTOR_CACHE_DIR" "/cache/inductor" -}}
{{- if eq $worker.mode "gpu" -}}
{{- $_ := set $plain "NCCL_DEBUG" "WARN" -}}
{{- range $name, $value := .Values.nccl.env }}{{ $_ := set $plain $name $value }}{{ end -}}
{{- end -}}
{{- $mounts := list (dict "name" "cache" "mountPath" "/cache") -}}
{{- $volumes := list -}}
{{- $init := list -}}
{{- if not $worker.compileCache.enabled }}{{ $volumes = append $volumes (dict "name" "cache" "emptyDir" dict) }}{{ end -}}
{{- $shm := $worker.shm.enabled -}}
{{- if kindIs "invalid" $shm }}{{ $shm = gt $ranks 1 }}{{ end -}}
{{- if $shm -}}
{{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" $worker.shm.sizeLimit)) -}}
{{- end -}}
{{- if eq $source.type "pvc" -}}
{{- $mount := dict "name" "model" "mountPath" "/models/model" "readOnly" true -}}
{{- with $source.pvc.subPath }}{{ $_ := set $mount "subPath" . }}{{ end -}}
{{- $mounts = append $mounts $mount -}}
{{- $volumes = append $volumes (dict "name" "model" "persistentVolumeClaim" (dict "claimName" $source.pvc.claimName "readOnly" (eq $source.pvc.accessMode "ReadOnlyMany"))) -}}
{{- else if eq $source.type "hostPath" -}}
{{- $mounts = append $mounts (dict "name" "model" "mountPath" "/models/model" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "model" "hostPath" (dict "path" $source.hostPath.path "type" "Directory")) -}}
{{- else if eq $source.type "huggingFace" -}}
{{- $mounts = append $mounts (dict "name" "model" "mountPath" "/models") -}}
{{- $volumes = append $volumes (dict "name" "model" "emptyDir" (dict "sizeLimit" $source.huggingFace.size)) -}}
{{- $init = append $init (include "lockstep.download" . | fromYaml) -}}
{{- end -}}
{{- with include "lockstep.tlsMount" . | fromYaml -}}
{{- $_ := set $env "tls_folder" .mountPath -}}
{{- $mounts = append $mounts . -}}
{{- $volumes = append $volumes (include "lockstep.tlsVolume" $ | fromYaml) -}}
{{- end -}}
{{- $resources := deepCopy (default dict $worker.resources) -}}
{{- if eq $worker.mode "gpu" -}}
{{- $limits := deepCopy (default dict (get $resources "limits")) -}}
{{- $_ := set $limits $worker.gpuResource $ranks -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- $group := list (dict "name" "LOCKSTEP_WORKER_GROUP" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) -}}
{{- dict "component" "worker" "env" $env "plainEnv" $plain "mounts" $mounts "volumes" $volumes "initContainers" $init "resources" $resources "extraEnv" $group | toYaml -}}
{{- end -}}

{{- define "lockstep.download" -}}
{{- $source := .Values.model.source.huggingFace -}}
name: download
image: {{ include "lockstep.image" (dict "root" . "component" "worker" "settings" .Values.worker) | quote }}
imagePullPolicy: {{ .Values.worker.image.pullPolicy | default .Values.image.pullPolicy }}
command: ["python3", "-m", "services.worker.weights.download"]
args:
  - {{ $source.repository | quote }}
  - {{ $source.revision | quote }}
  - {{ include "lockstep.modelPath" . | quote }}
env: # a proxy and its certificate authorities are named in extraEnv
  {{- $env := dict "HOME" "/tmp" "HF_HOME" "/models/.cache" "HF_ENDPOINT" ($source.endpoint | default nil) }}
  {{- range $name, $value := .Values.worker.extraEnv }}{{ $_ := set $env $name $value }}{{ end }}
  {{- range $name, $value := $env }}
  {{- if not (kindIs "invalid" $value) }}
  - name: {{ $name | quote }}
    value: {{ include "lockstep.string" $value }}
  {{- end }}
  {{- end }}
  {{- with ternary "" (include "lockstep.hubSecret" .) (hasKey $env "HF_TOKEN") }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ . | quote }}
        key: {{ $source.secretKey | quote }}
  {{- end }}
{{- include "lockstep.envFrom" (dict "settings" .Values.worker) }}
{{- with .Values.worker.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.worker.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: temporary
    mountPath: /tmp
  - name: model
    mountPath: /models
  {{- with .Values.worker.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "lockstep.cacheClaim" -}}
{{- $cache := .Values.worker.compileCache -}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: cache
  spec:
    accessModes:
      {{- toYaml $cache.accessModes | nindent 6 }}
    {{- with $cache.storageClassName }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources:
      requests:
        storage: {{ include "lockstep.string" $cache.size }}
{{- end -}}
