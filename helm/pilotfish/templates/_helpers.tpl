{{- define "pilotfish.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay appends to the name of a RayService, and Kubernetes' names have at most 63 characters. */}}
{{- define "pilotfish.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "pilotfish.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "pilotfish.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pilotfish.selector" -}}
app.kubernetes.io/name: {{ include "pilotfish.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pilotfish.labels" -}}
{{ include "pilotfish.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pilotfish
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The metadata of an object: call with (list . SUFFIX), where SUFFIX is appended to the full name. */}}
{{- define "pilotfish.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "pilotfish.fullname" $root }}{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "pilotfish.labels" $root | nindent 2 }}
{{- end -}}

{{/* Selects the pods of the Ray cluster, and no other pod of the release. */}}
{{- define "pilotfish.clusterPods" -}}
matchLabels:
  {{- include "pilotfish.selector" . | nindent 2 }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [head, target, draft, ingress]
{{- end -}}

{{- define "pilotfish.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "pilotfish.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "pilotfish.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "pilotfish.raySecret" -}}
{{- .Values.secrets.ray.existingSecret | default (printf "%s-ray" (include "pilotfish.fullname" .)) -}}
{{- end -}}

{{- define "pilotfish.clusterSecret" -}}
{{- .Values.secrets.cluster.existingSecret | default (printf "%s-cluster" (include "pilotfish.fullname" .)) -}}
{{- end -}}

{{/* Most pods of a group: call with (list . GROUP). */}}
{{- define "pilotfish.mostPods" -}}
{{- $group := index . 1 -}}
{{- ternary $group.maxReplicas $group.replicas (and (index . 0).Values.autoscaling.enabled (not (kindIs "invalid" $group.maxReplicas))) -}}
{{- end -}}

{{/* Fewest pods of a group: call with (list . GROUP). */}}
{{- define "pilotfish.leastPods" -}}
{{- $group := index . 1 -}}
{{- ternary $group.minReplicas $group.replicas (and (index . 0).Values.autoscaling.enabled (not (kindIs "invalid" $group.minReplicas))) -}}
{{- end -}}

{{/* Pilotfish's settings: by default, each pod of a role has one replica of the role, and no replica runs elsewhere. */}}
{{- define "pilotfish.settings" -}}
{{- $workers := .Values.workers -}}
{{- $least := include "pilotfish.leastPods" (list . $workers.target) | int -}}
{{- $most := include "pilotfish.mostPods" (list . $workers.target) | int -}}
{{- $target := dict "node_resource" "pilotfish-target" "replicas" (max 1 $least) -}}
{{- if gt $most $least -}}
{{- $_ := set $target "autoscaling" (dict "max_replicas" $most) -}}
{{- end -}}
{{- $drafters := include "pilotfish.leastPods" (list . $workers.draft) | int -}}
{{- $draft := dict "node_resource" "pilotfish-ingress" -}}
{{- if $drafters -}}
{{- $draft = dict "node_resource" "pilotfish-draft" "replicas" $drafters -}}
{{- end -}}
{{- $server := dict "grpc_host" "0.0.0.0" "grpc_port" 9000 "drain_timeout_seconds" 30 -}}
{{- $_ := set $server "ingress_node_resource" "pilotfish-ingress" -}}
{{- $_ := set $server "allowed_hosts" (include "pilotfish.hosts" . | fromYamlArray) -}}
{{- $_ := set $server "ingress_replicas" (max 1 (include "pilotfish.leastPods" (list . $workers.ingress) | int)) -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $server "api_key_file" (include "pilotfish.apiKeysDirectory" .) -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $directory := include "pilotfish.tlsDirectory" . -}}
{{- $tls := dict "certificate" (printf "%s/tls.crt" $directory) "key" (printf "%s/tls.key" $directory) -}}
{{- if .Values.tls.clientCertificates -}}
{{- $_ := set $tls "client_ca" (printf "%s/ca.crt" $directory) -}}
{{- end -}}
{{- $_ := set $server "tls" $tls -}}
{{- end -}}
{{- $chart := dict "config" .Values.preset "target" $target "draft" $draft "server" $server -}}
{{- mergeOverwrite $chart (deepCopy .Values.settings) | toYaml -}}
{{- end -}}

{{/* The names under which clients reach the HTTP API: those of its Services, of the Ingress and of the Gateway. */}}
{{- define "pilotfish.hosts" -}}
{{- $hosts := list -}}
{{- range $suffix := tuple "http" "metrics" "serve-svc" -}}
{{- $name := printf "%s-%s" (include "pilotfish.fullname" $) $suffix -}}
{{- $namespaced := printf "%s.%s" $name $.Release.Namespace -}}
{{- $hosts = concat $hosts (list $name $namespaced (printf "%s.svc" $namespaced) (printf "%s.svc.cluster.local" $namespaced)) -}}
{{- end -}}
{{- range tuple .Values.ingress .Values.gateway -}}
{{- if .enabled -}}
{{- $hosts = append $hosts .http.host -}}
{{- end -}}
{{- end -}}
{{- toYaml ($hosts | uniq) -}}
{{- end -}}

{{- define "pilotfish.apiKeysDirectory" -}}
/etc/pilotfish/api-keys
{{- end -}}

{{- define "pilotfish.tlsDirectory" -}}
/etc/pilotfish/tls
{{- end -}}

{{- define "pilotfish.httpScheme" -}}
{{- ternary "https" "http" (hasKey (include "pilotfish.server" . | fromYaml) "tls") -}}
{{- end -}}

{{/* The settings in force of the section `server`. */}}
{{- define "pilotfish.server" -}}
{{- (include "pilotfish.settings" . | fromYaml).server | toYaml -}}
{{- end -}}

{{- define "pilotfish.grpcPort" -}}
{{- (include "pilotfish.server" . | fromYaml).grpc_port | int -}}
{{- end -}}

{{- define "pilotfish.drainSeconds" -}}
{{- (include "pilotfish.server" . | fromYaml).drain_timeout_seconds | float64 | ceil | int -}}
{{- end -}}

{{/* Seconds from a pod's first notice to its end: longer than the drain. */}}
{{- define "pilotfish.graceSeconds" -}}
{{- add (include "pilotfish.drainSeconds" . | int) (.Values.terminationMarginSeconds | int) -}}
{{- end -}}

{{/* Ray's object store holds configurations only, and must fit into /dev/shm. */}}
{{- define "pilotfish.objectStoreBytes" -}}
100663296
{{- end -}}

{{/* What Serve deploys: the whole configuration file of `serve deploy`. */}}
{{- define "pilotfish.serveConfig" -}}
{{- $application := dict "name" .Values.serve.application "route_prefix" .Values.serve.routePrefix -}}
{{- $_ := set $application "import_path" "deploy.ray.application:build_app" -}}
{{- $_ := set $application "args" (include "pilotfish.settings" . | fromYaml) -}}
{{- with .Values.serve.deployments -}}
{{- $_ := set $application "deployments" . -}}
{{- end -}}
{{- $http := dict "host" "0.0.0.0" "port" 8000 -}}
{{- with (include "pilotfish.server" . | fromYaml).tls -}}
{{- $_ := set $http "ssl_keyfile" .key -}}
{{- $_ := set $http "ssl_certfile" .certificate -}}
{{- with .client_ca -}}
{{- $_ := set $http "ssl_ca_certs" . -}}
{{- end -}}
{{- end -}}
{{- dict
  "proxy_location" "EveryNode"
  "http_options" $http
  "applications" (prepend .Values.serve.extraApplications $application)
| toYaml -}}
{{- end -}}
