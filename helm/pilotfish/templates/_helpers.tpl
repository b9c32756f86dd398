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

{{/* The image of a pod: call with (list . IMAGE), where IMAGE replaces parts of `image`. A digest takes the tag's place. */}}
{{- define "pilotfish.image" -}}
{{- $root := index . 0 -}}
{{- $given := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $repository := $given.repository | default $image.repository -}}
{{- $digest := $given.digest | default (ternary "" $image.digest (or $given.repository $given.tag | not | not)) -}}
{{- if $digest -}}
{{ $repository }}@{{ $digest }}
{{- else -}}
{{ $repository }}:{{ $given.tag | default $image.tag | default $root.Chart.AppVersion }}
{{- end -}}
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

{{/*
The worker groups by name, each with its role, the Ray resource that its pods offer, and `least` and `most`, the bounds of its pods.
A further group takes what it does not name from the group of its role. It serves the first model unless one of `applications` names it.
*/}}
{{- define "pilotfish.groups" -}}
{{- $roles := list "target" "draft" "ingress" -}}
{{- $named := list -}}
{{- range .Values.applications -}}
{{- $named = concat $named (values (.groups | default dict)) -}}
{{- end -}}
{{- range $named -}}
{{- if not (hasKey $.Values.workers .) -}}
{{- fail (printf "applications: there is no group %s in workers" .) -}}
{{- end -}}
{{- end -}}
{{- $groups := dict -}}
{{- range $name, $given := .Values.workers -}}
{{- $group := deepCopy $given -}}
{{- $role := $name -}}
{{- if not (has $name $roles) -}}
{{- $role = required (printf "workers.%s.role: a further group needs the role target, draft or ingress" $name) $given.role -}}
{{- $group = omit (deepCopy (get $.Values.workers $role)) "minReplicas" "maxReplicas" "minAvailable" -}}
{{- range $key, $value := $given -}}
{{- $_ := set $group $key $value -}}
{{- end -}}
{{- end -}}
{{- $least := $group.replicas | int -}}
{{- $most := $group.replicas | int -}}
{{- if $.Values.autoscaling.enabled -}}
{{- $least = ternary $least ($group.minReplicas | int) (kindIs "invalid" $group.minReplicas) -}}
{{- $most = ternary $most ($group.maxReplicas | int) (kindIs "invalid" $group.maxReplicas) -}}
{{- end -}}
{{- $resource := printf "pilotfish-%s" (ternary $name $role (has $name $named)) -}}
{{- $_ := mergeOverwrite $group (dict "role" $role "resource" $resource "least" $least "most" $most) -}}
{{- if gt $most 0 -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* The models, that of the chart's own settings first: `{models: [{name, routePrefix, ingress, port, deployments, arguments}]}`. */}}
{{- define "pilotfish.models" -}}
{{- $first := dict "name" .Values.serve.application "routePrefix" .Values.serve.routePrefix "preset" .Values.preset -}}
{{- $_ := mergeOverwrite $first (dict "settings" .Values.settings "deployments" .Values.serve.deployments) -}}
{{- $models := list -}}
{{- range $index, $model := prepend .Values.applications $first -}}
{{- $arguments := include "pilotfish.arguments" (dict "root" $ "model" $model "index" $index) | fromYaml -}}
{{- $entry := pick $model "name" "routePrefix" "deployments" -}}
{{- $ingress := $arguments.server.ingress_node_resource -}}
{{- $port := printf "grpc%s" (ternary "" (printf "-%d" $index) (eq $index 0)) -}}
{{- $models = append $models (mergeOverwrite $entry (dict "arguments" $arguments "ingress" $ingress "port" $port)) -}}
{{- end -}}
{{- dict "models" $models | toYaml -}}
{{- end -}}

{{/*
The arguments of a model's application: call with (dict "root" . "model" MODEL "index" INDEX). By default, each pod of the model's own
groups has one replica of the group's role. A role without a group of the model's own runs in the first model's pods.
*/}}
{{- define "pilotfish.arguments" -}}
{{- $root := .root -}}
{{- $own := .model.groups | default dict -}}
{{- $resources := dict -}}
{{- $least := dict "target" 0 "draft" 0 "ingress" 0 -}}
{{- $most := dict "target" 0 "draft" 0 "ingress" 0 -}}
{{- range $role := keys $least -}}
{{- $_ := set $resources $role (printf "pilotfish-%s" (get $own $role | default $role)) -}}
{{- end -}}
{{- range $name, $group := include "pilotfish.groups" $root | fromYaml -}}
{{- if and (eq $group.resource (get $resources $group.role)) (or (eq $.index 0) (hasKey $own $group.role)) -}}
{{- $_ := set $least $group.role (add (get $least $group.role) $group.least) -}}
{{- $_ := set $most $group.role (add (get $most $group.role) $group.most) -}}
{{- end -}}
{{- end -}}
{{- $target := dict "node_resource" $resources.target "replicas" (max 1 $least.target) -}}
{{- if gt (int $most.target) (int $least.target) -}}
{{- $_ := set $target "autoscaling" (dict "max_replicas" $most.target) -}}
{{- end -}}
{{- $draft := dict "node_resource" $resources.ingress -}}
{{- if gt (int $least.draft) 0 -}}
{{- $draft = dict "node_resource" $resources.draft "replicas" $least.draft -}}
{{- end -}}
{{- $server := dict "grpc_host" "0.0.0.0" "grpc_port" (add 9000 .index) "drain_timeout_seconds" 30 -}}
{{- $_ := set $server "ingress_node_resource" $resources.ingress -}}
{{- $_ := set $server "allowed_hosts" (include "pilotfish.hosts" $root | fromYamlArray) -}}
{{- $_ := set $server "ingress_replicas" (max 1 $least.ingress) -}}
{{- if $root.Values.apiKeys.existingSecret -}}
{{- $_ := set $server "api_key_file" (include "pilotfish.apiKeysDirectory" $root) -}}
{{- end -}}
{{- if $root.Values.tls.existingSecret -}}
{{- $directory := include "pilotfish.tlsDirectory" $root -}}
{{- $tls := dict "certificate" (printf "%s/tls.crt" $directory) "key" (printf "%s/tls.key" $directory) -}}
{{- if $root.Values.tls.clientCertificates -}}
{{- $_ := set $tls "client_ca" (printf "%s/ca.crt" $directory) -}}
{{- end -}}
{{- $_ := set $server "tls" $tls -}}
{{- end -}}
{{- $chart := dict "config" (.model.preset | default $root.Values.preset) "target" $target "draft" $draft "server" $server -}}
{{- mergeOverwrite $chart (deepCopy (.model.settings | default dict)) | toYaml -}}
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

{{/* The settings in force of the first model's section `server`. */}}
{{- define "pilotfish.server" -}}
{{- (first (include "pilotfish.models" . | fromYaml).models).arguments.server | toYaml -}}
{{- end -}}

{{- define "pilotfish.grpcPort" -}}
{{- (include "pilotfish.server" . | fromYaml).grpc_port | int -}}
{{- end -}}

{{/* The longest drain of any model. */}}
{{- define "pilotfish.drainSeconds" -}}
{{- $seconds := 0 -}}
{{- range (include "pilotfish.models" . | fromYaml).models -}}
{{- $seconds = max $seconds (.arguments.server.drain_timeout_seconds | float64 | ceil | int) -}}
{{- end -}}
{{- $seconds -}}
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
{{- $applications := list -}}
{{- range (include "pilotfish.models" . | fromYaml).models -}}
{{- $application := dict "name" .name "route_prefix" .routePrefix "args" .arguments -}}
{{- $_ := set $application "import_path" "deploy.ray.application:build_app" -}}
{{- with .deployments -}}
{{- $_ := set $application "deployments" . -}}
{{- end -}}
{{- $applications = append $applications $application -}}
{{- end -}}
{{- $http := dict "host" "0.0.0.0" "port" 8000 -}}
{{- with (include "pilotfish.server" . | fromYaml).tls -}}
{{- $_ := set $http "ssl_keyfile" .key -}}
{{- $_ := set $http "ssl_certfile" .certificate -}}
{{- with .client_ca -}}
{{- $_ := set $http "ssl_ca_certs" . -}}
{{- end -}}
{{- end -}}
{{- dict "proxy_location" "EveryNode" "http_options" $http "applications" $applications | toYaml -}}
{{- end -}}
