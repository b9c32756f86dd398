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
{{- if gt $least $most -}}
{{- fail (printf "workers.%s: at least %d pods (minReplicas, else replicas) is more than at most %d (maxReplicas, else replicas)" $name $least $most) -}}
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
{{- $made := include "pilotfish.arguments" (dict "root" $ "model" $model "index" $index) | fromYaml -}}
{{- $entry := dict "name" $model.name "routePrefix" $model.routePrefix "arguments" $made.arguments -}}
{{- $_ := set $entry "deployments" (include "pilotfish.deployments" (list $model.deployments $made.replicas) | fromYamlArray) -}}
{{- $_ := set $entry "ingress" $made.arguments.server.ingress_node_resource -}}
{{- $_ := set $entry "port" (printf "grpc%s" (ternary "" (printf "-%d" $index) (eq $index 0))) -}}
{{- $models = append $models $entry -}}
{{- end -}}
{{- dict "models" $models | toYaml -}}
{{- end -}}

{{/*
The options of a model's Serve deployments: call with (list OPTIONS REPLICAS). REPLICAS has numbers by the names of deployments, one for
each pod. OPTIONS are those of the values, which come first. Pods join one after another, and Serve would put all ingresses into the first.
A single ingress may start beside the former one, which ends its streams.
*/}}
{{- define "pilotfish.deployments" -}}
{{- $own := dict -}}
{{- range $name, $number := index . 1 -}}
{{- $options := dict "num_replicas" $number -}}
{{- if and (eq $name "Ingress") (gt (int $number) 1) -}}
{{- $_ := set $options "max_replicas_per_node" 1 -}}
{{- end -}}
{{- $_ := set $own $name $options -}}
{{- end -}}
{{- $deployments := list -}}
{{- range $given := index . 0 | default list -}}
{{- $options := get $own $given.name | default dict -}}
{{- if or (hasKey $given "num_replicas") (hasKey $given "autoscaling_config") -}}
{{- $options = dict -}}
{{- end -}}
{{- $own = omit $own $given.name -}}
{{- $deployments = append $deployments (merge (deepCopy $given) $options) -}}
{{- end -}}
{{- range $name, $options := $own -}}
{{- $deployments = append $deployments (merge (dict "name" $name) $options) -}}
{{- end -}}
{{- toYaml $deployments -}}
{{- end -}}

{{/*
What a model's application is built with, and the numbers of its replicas: call with (dict "root" . "model" MODEL "index" INDEX). By
default, each pod of the model's own groups has one replica of the group's role. A role without a group of the model's own runs in the
first model's pods. Serve replaces all replicas when an argument changes, so numbers that pods decide are no arguments where that can be.
*/}}
{{- define "pilotfish.arguments" -}}
{{- $root := .root -}}
{{- $own := .model.groups | default dict -}}
{{- $resources := dict -}}
{{- $least := dict "target" 0 "draft" 0 "ingress" 0 -}}
{{- $most := dict "target" 0 "draft" 0 "ingress" 0 -}}
{{- $settings := .model.settings | default dict -}}
{{- $preset := .model.preset | default $root.Values.preset -}}
{{- $ranks := dig "target" "tensor_parallel" (get ($root.Files.Get "files/presets.yaml" | fromYaml) $preset).target.tensor_parallel $settings -}}
{{- $gpus := dict "least" 0 "most" 0 "areFew" false -}}
{{- range $role := keys $least -}}
{{- $_ := set $resources $role (printf "pilotfish-%s" (get $own $role | default $role)) -}}
{{- end -}}
{{- range $name, $group := include "pilotfish.groups" $root | fromYaml -}}
{{- if and (eq $group.resource (get $resources $group.role)) (or (eq $.index 0) (hasKey $own $group.role)) -}}
{{- $_ := set $least $group.role (add (get $least $group.role) $group.least) -}}
{{- $_ := set $most $group.role (add (get $most $group.role) $group.most) -}}
{{- if eq $group.role "target" -}}
{{- $_ := set $gpus "least" (add $gpus.least (mul $group.gpus $group.least)) -}}
{{- $_ := set $gpus "most" (add $gpus.most (mul $group.gpus $group.most)) -}}
{{- if lt (int $group.gpus) (int $ranks) -}}
{{- $_ := set $gpus "areFew" true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $spans := and (dig "target" "span_nodes" false $settings) (gt (int $gpus.most) 0) $gpus.areFew -}}
{{- /* Ranks on several nodes: as many targets as the GPUs of all pods are enough for. */}}
{{- if $spans -}}
{{- $_ := set $least "target" (div $gpus.least $ranks) -}}
{{- $_ := set $most "target" (div $gpus.most $ranks) -}}
{{- end -}}
{{- $target := dict "node_resource" $resources.target -}}
{{- $replicas := dict -}}
{{- $scales := or (gt (int $most.target) (int $least.target)) (gt (dig "target" "autoscaling" "max_replicas" 0 $settings | int) 0) -}}
{{- $chosen := 0 -}}
{{- range .model.deployments | default list -}}
{{- if eq .name "Target" -}}
{{- $chosen = int (.num_replicas | default 0) -}}
{{- end -}}
{{- end -}}
{{- $isPlanned := or $scales $spans (gt $chosen 0) (hasKey ($settings.target | default dict) "replicas") -}}
{{- if $isPlanned -}}
{{- $_ := set $target "replicas" (max 1 $least.target $chosen) -}}
{{- else -}}
{{- $_ := set $replicas "Target" (max 1 $least.target) -}}
{{- end -}}
{{- if gt (int $most.target) (int $least.target) -}}
{{- $_ := set $target "autoscaling" (dict "max_replicas" $most.target) -}}
{{- end -}}
{{- $draft := dict "node_resource" $resources.ingress -}}
{{- if gt (int $least.draft) 0 -}}
{{- $draft = dict "node_resource" $resources.draft "replicas" $least.draft -}}
{{- end -}}
{{- $server := dict "http_host" "0.0.0.0" "grpc_host" "0.0.0.0" "grpc_port" (add 9000 .index) "drain_timeout_seconds" 30 -}}
{{- $_ := set $server "ingress_node_resource" $resources.ingress -}}
{{- if not (hasKey ($settings.server | default dict) "ingress_replicas") -}}
{{- $_ := set $replicas "Ingress" (max 1 $least.ingress) -}}
{{- end -}}
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
{{- $merged := mergeOverwrite $chart (deepCopy $settings) -}}
{{- /* Names in the settings are further ones. */}}
{{- $hosts := concat (include "pilotfish.hosts" $root | fromYamlArray) ($merged.server.allowed_hosts | default list) -}}
{{- $_ := set $merged.server "allowed_hosts" (uniq $hosts) -}}
{{- $used := list $merged.target.node_resource $merged.draft.node_resource $merged.server.ingress_node_resource -}}
{{- $_ := set $merged "nodes" (include "pilotfish.nodes" (dict "root" $root "resources" $used "isPlanned" $isPlanned) | fromYamlArray) -}}
{{- dict "arguments" $merged "replicas" $replicas | toYaml -}}
{{- end -}}

{{/*
The Ray nodes for which a model's processes are planned: call with (dict "root" . "resources" NAMES "isPlanned" BOOLEAN), where BOOLEAN
says whether the number of targets is an argument. KubeRay has an application built before its pods are there. Groups with one resource
count as the smallest of them, so that a replica fits into each pod. Models whose targets or ingresses run in the same pods have equal
parts of the cores.
*/}}
{{- define "pilotfish.nodes" -}}
{{- $models := dict -}}
{{- range prepend .root.Values.applications dict -}}
{{- $own := .groups | default dict -}}
{{- range $role := tuple "target" "ingress" -}}
{{- $resource := printf "pilotfish-%s" (get $own $role | default $role) -}}
{{- $_ := set $models $resource (add 1 (get $models $resource | default 0)) -}}
{{- end -}}
{{- end -}}
{{- $nodes := dict -}}
{{- range $group := include "pilotfish.groups" .root | fromYaml -}}
{{- if has $group.resource $.resources -}}
{{- $cpus := include "pilotfish.bytes" $group.cpu | float64 | floor | max 1 | float64 -}}
{{- with get $group.rayStartParams "num-cpus" -}}
{{- $cpus = float64 . -}}
{{- end -}}
{{- $cpus = divf $cpus (get $models $group.resource | default 1) -}}
{{- $count := ternary (max 1 $group.least) 1 (or (eq $group.role "draft") (and $.isPlanned (eq $group.role "target"))) -}}
{{- $node := get $nodes $group.resource | default (dict "resource" $group.resource "cpus" $cpus "gpus" $group.gpus "count" 0) -}}
{{- $_ := set $node "cpus" (minf $cpus $node.cpus) -}}
{{- $_ := set $node "gpus" (min $group.gpus $node.gpus) -}}
{{- $_ := set $node "count" (add $count $node.count) -}}
{{- $_ := set $nodes $group.resource $node -}}
{{- end -}}
{{- end -}}
{{- $sorted := list -}}
{{- range $node := $nodes -}}
{{- $sorted = append $sorted $node -}}
{{- end -}}
{{- toYaml $sorted -}}
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
{{- $http := dict "host" (include "pilotfish.server" . | fromYaml).http_host "port" 8000 -}}
{{- with (include "pilotfish.server" . | fromYaml).tls -}}
{{- $_ := set $http "ssl_keyfile" .key -}}
{{- $_ := set $http "ssl_certfile" .certificate -}}
{{- with .client_ca -}}
{{- $_ := set $http "ssl_ca_certs" . -}}
{{- end -}}
{{- end -}}
{{- dict "proxy_location" "EveryNode" "http_options" $http "applications" $applications | toYaml -}}
{{- end -}}
