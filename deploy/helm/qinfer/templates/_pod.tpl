{{/* What the pods of all programs have in common. */}}

{{/* Settings that all programs share, as a map in YAML. */}}
{{- define "qinfer.core.settings" -}}
{{- $repository := .Values.repository -}}
{{- $settings := dict
  "QINFER_REDIS__CLUSTER" .Values.redis.cluster
  "QINFER_REPOSITORY__PATH" ($repository.path | default $repository.persistentVolumeClaim.mountPath)
  "QINFER_REPOSITORY__CONTROL_MODE" $repository.controlMode
  "QINFER_BULK__ENABLED" .Values.bulk.enabled
  "QINFER_STRICT_SETTINGS" false
-}}
{{- if $repository.loadModels }}{{ $_ := set $settings "QINFER_REPOSITORY__LOAD_MODELS" $repository.loadModels }}{{ end -}}
{{- if .Values.bulk.allow }}{{ $_ := set $settings "QINFER_STORES__ALLOW" .Values.bulk.allow }}{{ end -}}
{{- range $name, $value := .Values.settings }}{{ $_ := set $settings $name $value }}{{ end -}}
{{- range $name, $value := $settings }}
{{ $name }}: {{ include "qinfer.value" $value | quote }}
{{- end }}
{{- end -}}

{{/*
The environment: (dict "root" $ "own" (dict NAME value …) "extra" list "hook" false "tasks" false "gateway" false)
Secrets go where they are used: the URL of Celery's broker where `tasks`, the others where `gateway`.
*/}}
{{- define "qinfer.env" -}}
{{- $root := .root -}}
{{- $redis := $root.Values.redis -}}
{{- $secret := include "qinfer.redisSecret" (dict "root" $root "hook" .hook) -}}
- name: HOME
  value: /tmp
{{- range $name, $value := .own }}
- name: {{ $name }}
  value: {{ include "qinfer.value" $value | quote }}
{{- end }}
- name: QINFER_REDIS__URL
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $redis.existingSecret.urlKey }}}}
{{- if or $redis.existingSecret.sentinelPasswordKey $redis.sentinelPassword }}
- name: QINFER_REDIS__SENTINEL_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $redis.existingSecret.sentinelPasswordKey | default "sentinel-password" }}}}
{{- end }}
{{- $broker := $root.Values.bulk.broker }}
{{- if and .tasks (or $broker.url $broker.existingSecret.name) }}
- name: QINFER_BULK__BROKER_URL
  valueFrom: {secretKeyRef: {name: {{ $broker.existingSecret.name | default (printf "%s-broker" (include "qinfer.fullname" $root)) }}, key: {{ $broker.existingSecret.urlKey }}}}
{{- end }}
{{- if .gateway }}
{{- range $name, $ref := $root.Values.secretSettings }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $ref.name }}, key: {{ $ref.key }}}}
{{- end }}
{{- end }}
{{- with $root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where else the environment comes from: (dict "root" $ "hook" false) */}}
{{- define "qinfer.envFrom" -}}
{{- if not .hook }}
- configMapRef: {name: {{ include "qinfer.fullname" .root }}-settings}
{{- end }}
{{- with .root.Values.stores.credentialsSecret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{- define "qinfer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The beginning of a pod's spec: (dict "root" $ "account" name) */}}
{{- define "qinfer.podBase" -}}
serviceAccountName: {{ .account | default (include "qinfer.serviceAccount" .root) }}
automountServiceAccountToken: {{ .root.Values.serviceAccount.automountToken }}
enableServiceLinks: false  # their variables begin with QINFER_ where a Service's name does, and programs refuse unknown ones
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .root.Values.podSecurity.runAsUser }}
  runAsGroup: {{ int .root.Values.podSecurity.runAsGroup }}
  fsGroup: {{ int .root.Values.podSecurity.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where a pod runs: (dict "root" $ "of" values "component" c "group" g "gpu" false) */}}
{{- define "qinfer.scheduling" -}}
{{- $of := .of -}}
{{- with $of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $of.tolerations | default list -}}
{{- if .gpu }}
{{- $tolerations = append $tolerations (dict "key" .gpu "operator" "Exists" "effect" "NoSchedule") -}}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.topologySpread }}
topologySpreadConstraints:
{{- range . }}
  - maxSkew: {{ int (default 1 .maxSkew) }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ default "ScheduleAnyway" .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "qinfer.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Mounts: (dict "root" $ "models" true "cache" false "auth" false "tls" false "extra" list) */}}
{{- define "qinfer.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with .root.Values.repository.persistentVolumeClaim }}
{{- if and .claimName $.models }}
- {name: models, mountPath: {{ .mountPath }}, readOnly: {{ .readOnly }}{{ with .subPath }}, subPath: {{ . }}{{ end }}}
{{- end }}
{{- end }}
{{- if .cache }}
- {name: cache, mountPath: /var/cache/qinfer}
- {name: spool, mountPath: /var/spool/qinfer}
{{- end }}
{{- if and .auth (eq .root.Values.auth.mode "keys") }}
- {name: keys, mountPath: /etc/qinfer/keys, readOnly: true}
{{- end }}
{{- if and .tls .root.Values.gateway.tls.secretName }}
- {name: tls, mountPath: /etc/qinfer/tls, readOnly: true}
{{- end }}
{{- if .root.Values.redis.caSecret.name }}
- {name: redis-ca, mountPath: /etc/qinfer/redis-ca, readOnly: true}
{{- end }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The volumes of those mounts; `sizes` = {cache, spool} */}}
{{- define "qinfer.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- with .root.Values.repository.persistentVolumeClaim }}
{{- if and .claimName $.models }}
- {name: models, persistentVolumeClaim: {claimName: {{ .claimName }}, readOnly: {{ .readOnly }}}}
{{- end }}
{{- end }}
{{- if .cache }}
{{- if .cache.persistentVolumeClaim }}
- {name: cache, persistentVolumeClaim: {claimName: {{ .cache.persistentVolumeClaim }}}}
{{- else }}
- {name: cache, emptyDir: {sizeLimit: {{ .cache.sizeLimit }}}}
{{- end }}
- {name: spool, emptyDir: {sizeLimit: {{ .spool.sizeLimit }}}}
{{- end }}
{{- if and .auth (eq .root.Values.auth.mode "keys") }}
- name: keys
  secret:
    secretName: {{ .root.Values.auth.existingSecret.name }}
    items: [{key: {{ .root.Values.auth.existingSecret.key }}, path: keys.json}]
{{- end }}
{{- if and .tls .root.Values.gateway.tls.secretName }}
- {name: tls, secret: {secretName: {{ .root.Values.gateway.tls.secretName }}}}
{{- end }}
{{- with .root.Values.redis.caSecret }}
{{- if .name }}
- {name: redis-ca, secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}}
{{- end }}
{{- end }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}
