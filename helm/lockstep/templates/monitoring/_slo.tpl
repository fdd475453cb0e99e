{{- /* Rules and dashboards with the objectives of this release. Their files hold the defaults of monitoring.slo in three places: the label `le`
of a histogram's bound, the share at the end of a burn rate, and the steps of panels that name an objective. */ -}}

{{- /* A histogram's bound as its label has it: 2 is "2.0". */ -}}
{{- define "lockstep.bound" -}}
{{- $bound := float64 . -}}
{{- if eq $bound (floor $bound) }}{{ printf "%.1f" $bound }}{{ else }}{{ toJson $bound }}{{ end -}}
{{- end -}}

{{- /* (dict "root" $ "expr" string) */ -}}
{{- define "lockstep.bounds" -}}
{{- $slo := .root.Values.monitoring.slo -}}
{{- if contains "time_to_first_token" .expr -}}
{{- regexReplaceAll `le="[0-9.]+"` .expr (printf "le=%q" (include "lockstep.bound" $slo.ttftSeconds)) -}}
{{- else if contains "inter_token_latency" .expr -}}
{{- regexReplaceAll `le="[0-9.]+"` .expr (printf "le=%q" (include "lockstep.bound" $slo.itlSeconds)) -}}
{{- else -}}
{{- .expr -}}
{{- end -}}
{{- end -}}

{{- /* Rule file of this release's namespace, as YAML. */ -}}
{{- define "lockstep.rules" -}}
{{- $slo := .Values.monitoring.slo -}}
{{- $shares := dict "ttft" $slo.ttftShare "itl" $slo.itlShare "availability" $slo.availability -}}
{{- $rules := .Files.Get "files/rules.yaml" | fromYaml -}}
{{- range $group := $rules.groups -}}
{{- range $rule := $group.rules -}}
{{- $expr := include "lockstep.bounds" (dict "root" $ "expr" $rule.expr) | replace `namespace=~".*"` (printf "namespace=%q" $.Release.Namespace) -}}
{{- with get (default dict $rule.labels) "slo" -}}
{{- $expr = regexReplaceAll `\(1 - [0-9.]+\)$` $expr (printf "(1 - %s)" (get $shares . | float64 | toJson)) -}}
{{- end -}}
{{- $_ := set $rule "expr" $expr -}}
{{- with $rule.annotations -}}
{{- $_ := set . "runbook_url" (replace "docs/runbooks.md" $.Values.monitoring.prometheusRule.runbookUrl .runbook_url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{- /* (dict "root" $ "path" "files/dashboards/overview.json"), as JSON. */ -}}
{{- define "lockstep.dashboard" -}}
{{- $root := .root -}}
{{- $dashboard := $root.Files.Get .path | fromJson -}}
{{- range $panel := $dashboard.panels -}}
{{- range $target := $panel.targets -}}
{{- $_ := set $target "expr" (include "lockstep.bounds" (dict "root" $root "expr" $target.expr)) -}}
{{- end -}}
{{- with $panel.fieldConfig -}}
{{- range $step := .defaults.thresholds.steps -}}
{{- with get $step "objective" -}}{{- $_ := set $step "value" (get $root.Values.monitoring.slo . | float64) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $dashboard -}}
{{- end -}}
