{{- define "kvpool.name" -}}
{{- .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvpool.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvpool.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvpool.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "kvpool.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- /* What never changes for a component: (list . "daemon") */ -}}
{{- define "kvpool.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "kvpool.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "kvpool.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvpool.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{- /* Whether peers may speak in the clear. */ -}}
{{- define "kvpool.plaintext" -}}
{{- if not .Values.plaintext.peers }}
{{- fail "peers would speak in the clear: set tls.enabled, or plaintext.peers where the pods' network is trusted" }}
{{- end }}
{{- true }}
{{- end }}

{{- /* The secret with the router's certificate; empty: none. Values of an older release have no such table. */ -}}
{{- define "kvpool.routerTls" -}}
{{- with .Values.router.tls }}{{ .existingSecret }}{{ end }}
{{- end }}
{{- define "kvpool.routerCa" -}}
{{- with .Values.router.tls }}{{ .ca | default "" }}{{ end }}
{{- end }}

{{- /* Whether several routers schedule as one, and who signs their certificates. */ -}}
{{- define "kvpool.routerGroup" -}}
{{- if and (gt (int .Values.router.replicas) 1) (not (hasKey .Values.router.settings "routers")) }}true{{ end }}
{{- end }}
{{- define "kvpool.routerGroupCa" -}}
{{- if and (include "kvpool.routerGroup" .) (include "kvpool.routerTls" .) }}{{ include "kvpool.routerCa" . }}{{ end }}
{{- end }}

{{- /* Whether clients may speak with the router in the clear. */ -}}
{{- define "kvpool.routerPlaintext" -}}
{{- if not .Values.plaintext.router }}
{{- fail "clients would send prompts and tokens to the router in the clear: set router.tls.existingSecret, or plaintext.router where the pods' network is trusted" }}
{{- end }}
{{- true }}
{{- end }}

{{- /* The etcd of the membership. */ -}}
{{- define "kvpool.join" -}}
{{- if .Values.cluster.join }}
{{- .Values.cluster.join }}
{{- else if .Values.etcd.enabled }}
{{- $name := include "kvpool.fullname" . }}
{{- $hosts := list }}
{{- range $i := until (int .Values.etcd.replicas) }}
{{- $hosts = append $hosts (printf "%s-etcd-%d.%s-etcd:2379" $name $i $name) }}
{{- end }}
{{- printf "etcd://%s" (join "," $hosts) }}
{{- else }}
{{- fail "cluster.join: name an etcd, such as etcds://HOST:2379, or set etcd.enabled" }}
{{- end }}
{{- end }}

{{- /* The Redis of the directory; empty: nodes ask each other. */ -}}
{{- define "kvpool.directory" -}}
{{- if .Values.cluster.directory }}
{{- .Values.cluster.directory }}
{{- else if .Values.redis.enabled }}
{{- if not .Values.plaintext.passwords }}
{{- fail "this chart's Redis has no TLS, so its password goes over the pods' network in the clear: set plaintext.passwords, or name a Redis with TLS (cluster.directory)" }}
{{- end }}
{{- printf "redis://%s-redis:6379" (include "kvpool.fullname" .) }}
{{- end }}
{{- end }}

{{- define "kvpool.secretEnv" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ (index . 0).Values.secrets.existingSecret }}
      key: {{ index . 2 }}
      optional: {{ index . 3 }}
{{- end }}

{{- define "kvpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvpool.routerDrain" -}}
{{ add (int .Values.router.drainSeconds) 20 }}
{{- end }}
