{{/* Names, labels and small functions. Nothing here asks the cluster: what is rendered depends on the values alone. */}}

{{- define "qinfer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select: (dict "root" $ "component" "gateway" "group" "" "bridge" "") */}}
{{- define "qinfer.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
qinfer.dev/worker-group: {{ . }}
{{- end }}
{{- with .bridge }}
qinfer.dev/bridge: {{ . }}
{{- end }}
{{- end -}}

{{- define "qinfer.labels" -}}
{{ include "qinfer.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: qinfer
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* One map over another, as YAML: (list base over). Unlike `mergeOverwrite`, false, 0 and "" of `over` count. */}}
{{- define "qinfer.merge" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) -}}
{{- $_ := set $merged $key (fromYaml (include "qinfer.merge" (list (get $merged $key) $value))) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* A value as a program reads it from its environment: whole numbers without exponent, lists as JSON. */}}
{{- define "qinfer.value" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%d" (int64 .) }}{{- else -}}{{ toJson . }}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- toJson . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{- define "qinfer.image" -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default .appVersion) -}}
{{- end -}}
{{- end -}}

{{- define "qinfer.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "qinfer.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The Secret that has the URL of Redis; `hook` = its copy that is there before the release. */}}
{{- define "qinfer.redisSecret" -}}
{{- $root := .root -}}
{{- $root.Values.redis.existingSecret.name | default (printf "%s-redis%s" (include "qinfer.fullname" $root) (ternary "-sync" "" .hook)) -}}
{{- end -}}

{{- define "qinfer.scheme" -}}
{{- ternary "https" "http" (not (empty .Values.gateway.tls.secretName)) -}}
{{- end -}}

{{/* Seconds from SIGTERM to SIGKILL: what is set, or what the program needs; less is refused. (dict "set" x "needed" n "where" "…") */}}
{{- define "qinfer.grace" -}}
{{- $needed := int .needed -}}
{{- if .set -}}
{{- if lt (int .set) $needed -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: Kubernetes would kill what drains; it takes at least %d (drainS, preStopS and a margin), or leave it unset" .where (int .set) $needed) -}}
{{- end -}}
{{- int .set -}}
{{- else -}}
{{- $needed -}}
{{- end -}}
{{- end -}}

{{/* What the schema can't say; included once. */}}
{{- define "qinfer.check" -}}
{{- $redis := .Values.redis -}}
{{- if and (not $redis.url) (not $redis.existingSecret.name) -}}
{{- fail "set redis.existingSecret.name (a Secret that has the URL of Redis), or redis.url" -}}
{{- end -}}
{{- if and $redis.url $redis.existingSecret.name -}}
{{- fail "redis.url and redis.existingSecret.name are both set; keep one" -}}
{{- end -}}
{{- if and $redis.cluster (contains "+sentinel" $redis.url) -}}
{{- fail "redis.cluster is set, and redis.url names Sentinels; it is one or the other" -}}
{{- end -}}
{{- if and $redis.cluster .Values.bulk.enabled (not .Values.bulk.broker.url) (not .Values.bulk.broker.existingSecret.name) -}}
{{- fail "bulk.enabled on a Redis Cluster: Celery can't use one; set bulk.broker.existingSecret.name or bulk.broker.url to another Redis" -}}
{{- end -}}
{{- if not (or .Values.repository.path .Values.repository.persistentVolumeClaim.claimName) -}}
{{- fail "set repository.path (such as s3://bucket/models) or repository.persistentVolumeClaim.claimName: where the models are" -}}
{{- end -}}
{{- if not .Values.auth.mode -}}
{{- fail "set auth.mode: `keys` (with auth.existingSecret.name) or `none` to let everyone who reaches the Service call" -}}
{{- end -}}
{{- if and (eq .Values.auth.mode "keys") (not .Values.auth.existingSecret.name) -}}
{{- fail "auth.mode is `keys`: set auth.existingSecret.name, a Secret that has the file of API keys" -}}
{{- end -}}
{{- $names := dict -}}
{{- range .Values.workerGroups -}}
{{- if hasKey $names .name -}}
{{- fail (printf "workerGroups: two groups have the name %q" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- include "qinfer.checkBridges" . -}}
{{- end -}}

{{- define "qinfer.checkBridges" -}}
{{- $names := dict -}}
{{- range $own := .Values.bridges -}}
{{- if hasKey $names .name -}}
{{- fail (printf "bridges: two have the name %q" .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- $bridge := fromYaml (include "qinfer.merge" (list $.Values.bridgeDefaults $own)) -}}
{{- if and $bridge.existingSecret.name $bridge.config -}}
{{- fail (printf "bridges: %q has existingSecret.name and config; keep one" .name) -}}
{{- end -}}
{{- if not (or $bridge.existingSecret.name $bridge.config) -}}
{{- fail (printf "bridges: %q has no routes: set existingSecret.name (a Secret with the file), or config" .name) -}}
{{- end -}}
{{- $links := list -}}
{{- range $route := $bridge.config.routes -}}
{{- range $link := list $route.source $route.sink -}}
{{- if kindIs "map" $link }}{{ $links = append $links (pick $link "url" "options") }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $written := regexReplaceAll "\\$\\{\\w+\\}" (toJson $bridge.config) "" -}}
{{- $linked := regexReplaceAll "\\$\\{\\w+\\}" (toJson $links) "" -}}
{{- $secrets := "(?i)(password|passwd|secret|token)([^\"]*\":\"[^\"]+\"|[a-z_]*=[^\"\\\\])" -}}
{{- if or (regexMatch "://[^/@\"]*:[^/@\"]+@|\"password\":\"[^\"]+\"" $written) (regexMatch $secrets $linked) -}}
{{- fail (printf "bridges: the config of %q has a password, and a ConfigMap is no place for one: write ${NAME} and set secretEnv.NAME, or use existingSecret" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
